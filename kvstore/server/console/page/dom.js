// Elements without markup: whatever a node says becomes text, never HTML.

const SVG = "http://www.w3.org/2000/svg";

function made(node, props, children) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined || value === false) continue;
    if (name.startsWith("on")) node.addEventListener(name.slice(2), value);
    else node.setAttribute(name, value === true ? "" : String(value));
  }
  node.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return node;
}

/** An HTML element: attributes, `on...` listeners, then children; strings become text. */
export const h = (tag, props = {}, ...children) => made(document.createElement(tag), props, children);

/** An SVG element. */
export const s = (tag, props = {}, ...children) => made(document.createElementNS(SVG, tag), props, children);

/** Sets text only where it changed, so that a selection in it stays. */
export function text(node, value) {
  const next = String(value);
  if (node.textContent !== next) node.textContent = next;
}

/**
 * Makes the children of `parent` those of `items`, by key: what is there stays, with its focus; new ones are made, old ones go.
 * `make(item)` gives a node; `update(node, item)` fills it.
 */
export function keyed(parent, items, key, make, update) {
  const before = new Map([...parent.children].map((node) => [node.dataset.key, node]));
  let at = parent.firstElementChild;
  for (const item of items) {
    const name = String(key(item));
    let node = before.get(name);
    before.delete(name);
    if (!node) {
      node = make(item);
      node.dataset.key = name;
    }
    update(node, item);
    if (node === at) at = at.nextElementSibling;
    else parent.insertBefore(node, at);
  }
  for (const node of before.values()) node.remove();
}

/** A table whose rows collapse to labelled lines on a phone: `columns` are {name, num?, cell(item) -> string or node}. */
export class Table {
  constructor(caption, columns, { key, empty = "" } = {}) {
    this.columns = columns;
    this.key = key ?? ((item) => item.key);
    this.body = h("tbody");
    this.note = h("p", { class: "empty", hidden: true }, empty);
    const head = h("tr", {}, columns.map((column) => h("th", { scope: "col", class: column.num && "num" }, column.name)));
    this.table = h("table", {}, h("caption", { class: "hidden" }, caption), h("thead", {}, head), this.body);
    this.element = h("div", { class: "table" }, this.table, this.note);
  }

  show(items) {
    this.table.hidden = !items.length;
    this.note.hidden = items.length > 0;
    keyed(this.body, items, this.key, () => this.#row(), (row, item) => this.#fill(row, item));
  }

  #row() {
    return h("tr", {}, this.columns.map((column) => h(column.header ? "th" : "td", {
      scope: column.header && "row",
      class: [column.num && "num", column.class].filter(Boolean).join(" ") || null,
      "data-label": column.name,
    })));
  }

  #fill(row, item) {
    this.columns.forEach((column, index) => {
      const cell = row.children[index];
      const found = column.cell(item, cell.firstChild);
      if (!(found instanceof Node)) text(cell, found ?? "");
      else if (cell.firstChild !== found) cell.replaceChildren(found);
    });
  }
}

/** Names and values; `show` takes [name, value] pairs, a value being text or a node, of which those without a value are left out. */
export class Facts {
  constructor() {
    this.element = h("dl", { class: "facts" });
  }

  show(pairs) {
    keyed(
      this.element,
      pairs.filter(([, value]) => value !== null && value !== undefined && value !== ""),
      ([name]) => name,
      ([name]) => h("div", {}, h("dt", {}, name), h("dd")),
      (node, [, value, tone]) => {
        if (value instanceof Node) node.lastChild.replaceChildren(value);
        else text(node.lastChild, value);
        node.lastChild.className = tone ?? "";
      },
    );
  }
}

/** A part of a view, with its heading. */
export function panel(title, props, ...children) {
  const { class: kind, actions, ...rest } = props;
  return h("section", { class: `panel ${kind ?? ""}`.trim(), "aria-label": title, ...rest },
    h("div", { class: "title" }, h("h2", {}, title), actions), children);
}

/** Asks before something that cannot be undone; true where it is wanted. Escape and Cancel say no. */
export function confirmed(title, lines, act) {
  return new Promise((resolve) => {
    const close = (answer) => () => dialog.close(answer);
    const cancel = h("button", { type: "button", onclick: close("") }, "Cancel");
    const dialog = h("dialog", { "aria-labelledby": "asked", onclose: () => { dialog.remove(); resolve(dialog.returnValue === "yes"); } },
      h("h2", { id: "asked" }, title),
      lines.map((line) => h("p", {}, line)),
      h("div", { class: "buttons" }, cancel, h("button", { type: "button", class: "danger", onclick: close("yes") }, act)));
    document.body.append(dialog);
    dialog.showModal();
    cancel.focus();
  });
}
