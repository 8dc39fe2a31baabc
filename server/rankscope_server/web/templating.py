"""
Templates: one file per page, and a fragment is a block of its page.
"""

import secrets
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from jinja2_fragments import render_block

from rankscope_server import __version__
from rankscope_server.web import guidance, links, words
from rankscope_server.web.assets import Assets
from rankscope_server.web.sparkline import draw_sparkline
from rankscope_server.web.strip import draw_strip

FILTERS = {
    "known": words.known,
    "signed_drift": words.signed_drift,
    "rate": words.rate,
    "age": words.age,
    "sample_age": words.sample_age,
    "marks": words.marks,
    "duration": words.duration,
    "is_fresh": words.is_fresh,
    "moment": words.moment,
    "short_engine": words.short_engine,
    "tone": words.tone,
    "slug": words.slug,
    "sentence": words.sentence,
    "capital": words.capital,
    "plural": words.plural,
    "elapsed": words.elapsed,
    "file_size": words.file_size,
    "forecast_phrase": words.forecast_phrase,
    "life_tone": words.life_tone,
    "alert_tone": words.alert_tone,
    "severity_tone": words.severity_tone,
    "receiver_state": words.receiver_state,
    "progress_sentence": words.progress_sentence,
    "sparkline": draw_sparkline,
    "strip": draw_strip,
}
MACROS = (
    "icon",
    "state_badge",
    "role_tag",
    "fix_tag",
    "drift_chip",
    "connection",
    "unknown_code_banner",
    "life_badge",
    "severity_tag",
    "evidence",
    "nav_count",
    "history",
    "engine_link",
    "incident_rows",
    "alert_rows",
)
FUNCTIONS = {
    "assess_card": guidance.assess_card,
    "assess_engine": guidance.assess_engine,
    "needs_somebody": guidance.needs_somebody,
    "foresees": guidance.foresees,
    "engine_path": links.engine_path,
    "incident_path": links.incident_path,
    "incidents_path": links.incidents_path,
    "capture_path": links.capture_path,
    "trace_path": links.trace_path,
    "export_path": links.export_path,
    "alerts_path": links.alerts_path,
    "fix_path": links.fix_path,
    "stream_path": links.stream_path,
    "api_path": links.api_path,
    "element_id": links.element_id,
}


class Templates:
    """
    Renders pages and their fragments. What a template names and does not get is an error, never an empty string.
    """

    def __init__(self, templates_dir: Path, assets: Assets) -> None:
        self._environment = Environment(
            loader=FileSystemLoader(templates_dir),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
        )
        self._environment.filters.update(FILTERS)
        self._environment.globals.update(FUNCTIONS, asset=assets.url, server_version=__version__)
        # Macros are globals, not imports of the pages: a block that is rendered by itself runs no import of its page.
        macros = self._environment.get_template("_macros.html").module
        self._environment.globals.update({name: getattr(macros, name) for name in MACROS})

    def page(self, name: str, **context: object) -> str:
        """
        A whole page. It gets a nonce of its own, without which htmx acts on no attribute: see `base.html`.
        """
        return self._environment.get_template(name).render(nonce=secrets.token_urlsafe(16), **context)

    def block(self, name: str, block: str, **context: object) -> str:
        """
        One fragment of a page.
        """
        return str(render_block(self._environment, name, block, **context))
