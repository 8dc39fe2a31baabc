"""
The traffic that a person watches: it holds the guard open while drift grows, then thins out.

While it holds, anchors run at any time: requests whose drafts are all right, which never drift, so that at least one
request of each batch is unmasked on every rank and the guard says `broadcast` everywhere. Several, and long ones: on a
busy machine it can take seconds until the next one follows one that has ended. Around them, long
requests drift further the longer they run, and short ones come and go. Once the anchors stop, the first batch in
which every request is masked on the first rank parts the guards, and an engine without the fix wedges.
"""

from rankscope_lab.traffic import Phase, Plan, Stream

ANCHORS = Stream("anchors", lengths=(600, 1200), running=4, anchor=True)
LONG = Stream("long", lengths=(800, 1500), running=2)
SHORT = Stream("short", lengths=(20, 60), rate=4.0)
SPARSE = Stream("sparse", lengths=(20, 119), rate=0.5, regular=False)

HOLD, THIN = "hold", "thin"


def story(hold_seconds: float, *, seed: int, slots: int, timeout: float = 120.0) -> Plan:
    """
    Hold for so many seconds, then thin out and go on until it is cancelled.
    """
    return Plan(
        phases=(Phase(HOLD, hold_seconds, (ANCHORS, LONG, SHORT)), Phase(THIN, float("inf"), (LONG, SPARSE))),
        seed=seed,
        concurrency=slots,
        timeout=timeout,
    )
