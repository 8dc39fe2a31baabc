"""
One row of the matrix: both model runners of a release, and which of them it takes.
"""

import ast

from pydantic import BaseModel
from rankscope_exporter.examination import RUNNERS, RunnerExamination, assess_runner, examine_runner
from rankscope_exporter.hooks.sources import Read, SourceSubject, SourceTree

CONFIG_MODULE = "vllm.config.vllm"
ONLY_IF_ASKED, BY_MODEL, IF_SUPPORTED, UNKNOWN = (
    "V1; V2 only if asked for",
    "V1; V2 for some models",
    "V2 where it supports everything",
    "unknown",
)
"""
Which runner a release takes without `VLLM_USE_V2_MODEL_RUNNER`.
"""


class Row(BaseModel):
    """
    One release.
    """

    release: str
    problem: str = ""
    """Why nothing is known of it, and what to do; empty if it was examined."""
    runners: list[RunnerExamination] = []
    missing: list[str] = []
    """Runners whose module is there without the class that Rankscope knows."""
    default: str = UNKNOWN

    @property
    def unknown(self) -> list[str]:
        """
        What hooks and fix do not know of the release, in words.
        """
        nothing = [] if self.runners or self.problem else ["it has none of the model runners that Rankscope knows"]
        return nothing + self.missing + [problem for runner in self.runners for problem in assess_runner(runner)]

    def runner(self, name: str) -> RunnerExamination | None:
        """
        The examination of the runner in the module of `V1` or `V2`; None in a release without it.
        """
        module, class_name = RUNNERS[name]
        return next((each for each in self.runners if each.runner_class == f"{module}.{class_name}"), None)


def examine_release(release: str, read: Read) -> Row:
    """
    Run every probe and the fix's assessment on the text of a release, which `read` gives module by module.
    """
    tree = SourceTree(read)
    runners, missing = [], []
    try:
        for name, (module, class_name) in RUNNERS.items():
            loaded = tree.module(module)
            if loaded is None:
                continue
            if class_name in loaded.definitions:
                runners.append(examine_runner(SourceSubject(tree, module, class_name), f"{module}.{class_name}"))
            else:
                missing.append(f"{name} runner: unknown code, {module} has no class {class_name}")
        default = find_default(read(CONFIG_MODULE))
    except SyntaxError as error:
        return Row(release=release, problem=f"its text cannot be compiled ({error}): use the newest Python there is")
    return Row(release=release, runners=runners, missing=missing, default=default)


def find_default(text: str | None) -> str:
    """
    The rule by which a release picks its runner, from the text of its configuration module.
    """
    if text is None:
        return UNKNOWN
    names = {
        node.name: {inner.attr for inner in ast.walk(node) if isinstance(inner, ast.Attribute)}
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.FunctionDef)
    }
    rule = names.get("use_v2_model_runner")
    if rule is None:
        return ONLY_IF_ASKED
    if "_is_default_v2_model_runner_model" in rule:
        return BY_MODEL
    return IF_SUPPORTED if "_get_v2_model_runner_unsupported_features" in rule else UNKNOWN
