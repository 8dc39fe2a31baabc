// What a live page needs beside htmx: whether it is live, times in the reader's zone, sentences for screen readers.
(() => {
  const OLD_DATA_SECONDS = 3;
  const LOST_SECONDS = 4;

  // A <details> that the reader opened stays open when its fragment is replaced.
  htmx.registerExtension("rankscope", {
    htmx_before_morph_attr: (element, detail) => !(detail.attrName === "open" && element.tagName === "DETAILS"),
  });

  const zone = new Intl.DateTimeFormat(undefined, { dateStyle: "medium", timeStyle: "medium" });
  const localise = (root) => {
    for (const time of root.querySelectorAll("time[data-unix]")) {
      const local = zone.format(new Date(Number(time.dataset.unix) * 1000));
      if (time.textContent !== local) time.textContent = local;
    }
  };

  const announce = (sentence) => {
    document.getElementById("announcements").textContent = sentence;
  };

  const seconds = (span) => (span < 120 ? `${Math.floor(span)} s` : `${Math.floor(span / 60)} min`);

  const watchConnection = (stream) => {
    const text = document.getElementById("connection-text");
    let heard = null; // When the last heartbeat came (ms of the page's clock).
    let version = null; // Its version, and since when that version stands: data that do not change do not get younger.
    let versionSince = 0;
    let dataAge = null;
    let gone = false;

    const show = (state, sentence) => {
      if (stream.dataset.connection !== state) stream.dataset.connection = state;
      if (text.textContent !== sentence) text.textContent = sentence;
    };
    const refresh = () => {
      if (gone || heard === null) return;
      const now = performance.now();
      const silence = (now - heard) / 1000;
      const age = dataAge === null ? null : dataAge + (now - versionSince) / 1000;
      if (silence > LOST_SECONDS && !document.hidden) show("lost", `Connection lost ${seconds(silence)} ago, trying again`);
      else if (age !== null && age > OLD_DATA_SECONDS) show("old", `Last data ${seconds(age)} ago`);
      else show("live", "Live");
    };

    stream.addEventListener("heartbeat", (event) => {
      const beat = JSON.parse(event.detail.data);
      heard = performance.now();
      if (beat.version !== version) {
        version = beat.version;
        versionSince = heard;
        dataAge = beat.data_age_seconds;
      }
      refresh();
    });
    stream.addEventListener("announce", (event) => announce(event.detail.data));
    stream.addEventListener("gone", (event) => {
      gone = true;
      show("gone", `${event.detail.data} What you see is the last that was known.`);
      announce(event.detail.data);
      stream.removeAttribute("hx-sse:connect");
      htmx.process(stream, true);
    });
    // The extension reconnects a stream that was open; the first attempt it makes only once.
    stream.addEventListener("htmx:error", () => setTimeout(() => htmx.trigger(stream, "rankscope:connect"), 2000));
    setInterval(refresh, 1000);
  };

  const followStrip = () => {
    // The strip stays at its newest step, unless the reader went back to look at earlier ones.
    let atEnd = true;
    const scroller = () => document.getElementById("strip-scroll");
    const toEnd = () => {
      const strip = scroller();
      if (strip && atEnd) strip.scrollLeft = strip.scrollWidth;
    };
    document.addEventListener("scroll", (event) => {
      const strip = event.target;
      if (strip.id === "strip-scroll") atEnd = strip.scrollLeft + strip.clientWidth >= strip.scrollWidth - 20;
    }, { capture: true, passive: true });
    document.addEventListener("htmx:after:swap", toEnd);
    window.addEventListener("resize", toEnd);
    toEnd();
  };

  document.addEventListener("DOMContentLoaded", () => {
    localise(document);
    document.addEventListener("htmx:after:swap", () => localise(document));
    const stream = document.getElementById("stream");
    if (stream) watchConnection(stream);
    followStrip();
  });

  window.rankscope = { announce };
})();
