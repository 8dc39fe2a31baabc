// Opens confirmations in place. Without this script the same links and forms lead to pages.
(() => {
  let opener = null; // Id of the element that opened the dialog: it may have been replaced by the time it closes.

  document.addEventListener("DOMContentLoaded", () => {
    const dialog = document.getElementById("confirm-dialog");

    const send = (method, url, values) =>
      htmx.ajax(method, url, { target: "#confirm-body", swap: "innerHTML", values });

    const open = async (from, url) => {
      opener = from.id;
      await send("GET", url);
      if (!dialog.open) dialog.showModal();
      document.getElementById("confirm-title")?.focus();
    };

    const refused = (element) => {
      const reason = document.getElementById(element.getAttribute("aria-describedby"));
      window.rankscope.announce(reason ? reason.textContent.trim() : "This cannot be done now.");
    };

    document.addEventListener("click", (event) => {
      if (event.defaultPrevented || event.button !== 0 || event.ctrlKey || event.metaKey || event.shiftKey) return;
      const link = event.target.closest?.("a");
      if (link?.matches("[data-dialog]")) {
        event.preventDefault();
        open(link, link.href);
      } else if (dialog.open && link?.matches("[data-close]") && dialog.contains(link)) {
        event.preventDefault();
        dialog.close();
      }
    });

    document.addEventListener("submit", (event) => {
      const form = event.target;
      if (form.matches("[data-dialog]")) {
        event.preventDefault();
        const button = event.submitter ?? form.querySelector("button");
        if (button.getAttribute("aria-disabled") === "true") refused(button);
        else open(button, `${form.getAttribute("action")}?${new URLSearchParams(new FormData(form))}`);
      } else if (form.matches("[data-confirm]") && dialog.contains(form)) {
        event.preventDefault();
        for (const button of form.querySelectorAll("button")) button.disabled = true;
        send("POST", form.getAttribute("action"), Object.fromEntries(new FormData(form)));
      }
    });

    document.addEventListener("rankscope:toggled", (event) => {
      const { sentence, page } = event.detail;
      if (location.pathname !== page) {
        location.assign(`${page}#fix`);
        return;
      }
      dialog.close();
      window.rankscope.announce(sentence);
    });

    dialog.addEventListener("close", () => {
      document.getElementById("confirm-body").replaceChildren();
      const fallback = document.querySelector("#engine-fix button") ?? document.getElementById("main");
      (document.getElementById(opener) ?? fallback).focus();
    });
  });
})();
