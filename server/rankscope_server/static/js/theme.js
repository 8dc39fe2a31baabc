// The reader's choice of light or dark, before anything is painted. Without one the system's preference holds.
(() => {
  const KEY = "rankscope-theme";
  const CHOICES = ["system", "light", "dark"];
  const root = document.documentElement;

  const read = () => {
    try { return CHOICES.includes(localStorage.getItem(KEY)) ? localStorage.getItem(KEY) : "system"; } catch { return "system"; }
  };
  const apply = (choice) => {
    if (choice === "system") root.removeAttribute("data-theme");
    else root.dataset.theme = choice;
  };
  apply(read());

  document.addEventListener("DOMContentLoaded", () => {
    const button = document.getElementById("theme-switch");
    const name = document.getElementById("theme-name");
    const show = (choice) => {
      name.textContent = choice[0].toUpperCase() + choice.slice(1);
      button.setAttribute("aria-label", `Colours: ${choice}. Press for the next choice.`);
    };
    button.hidden = false;
    show(read());
    button.addEventListener("click", () => {
      const next = CHOICES[(CHOICES.indexOf(read()) + 1) % CHOICES.length];
      try { localStorage.setItem(KEY, next); } catch { /* The choice holds for this page only. */ }
      apply(next);
      show(next);
      document.dispatchEvent(new CustomEvent("rankscope:theme"));
    });
  });
})();
