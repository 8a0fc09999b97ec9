// The question for a token. It goes to sessionStorage, never into an address.

import { h } from "./dom.js";

/** The token, or null where nobody gave one. `wrong` says what became of the one before. */
export function askForToken(wrong) {
  return new Promise((resolve) => {
    let given = null;
    const input = h("input", { id: "token", type: "password", autocomplete: "off", spellcheck: "false", required: true, "aria-describedby": "token-note" });
    const take = (event) => {
      event.preventDefault();
      given = input.value.trim();
      dialog.close();
    };
    const dialog = h("dialog", { "aria-labelledby": "token-title", onclose: () => { dialog.remove(); resolve(given || null); } },
      h("h2", { id: "token-title" }, "Access token"),
      h("form", { onsubmit: take },
        h("label", { for: "token" }, "Token"),
        input,
        h("p", { id: "token-note", class: wrong ? "wrong" : "note" },
          wrong || "As kvtier tokens create printed it. It stays in this tab until the tab is closed."),
        h("div", { class: "buttons" },
          h("button", { type: "button", onclick: () => dialog.close() }, "Cancel"),
          h("button", { type: "submit", class: "primary" }, "Use it"))));
    document.body.append(dialog);
    dialog.showModal();
    input.focus();
  });
}
