// Merge the new page into the old one. Elements with a key (rows) are matched by key only, so that focus, open details and the
// button under the pointer stay with their row. With ``held`` no row is added, removed or moved: rows are updated in place, removed rows
// are marked, and a button offers the full update.
const keyOf = node => node.nodeType === Node.ELEMENT_NODE ? node.dataset.key ?? node.dataset.part ?? node.id ?? "" : "";
const isBlank = node => node.nodeType === Node.TEXT_NODE && !node.data.trim();
let waiting = false;

function morph(old, next, held) {
  const mine = [...old.childNodes], fresh = [...next.childNodes];
  const keyed = new Map(mine.filter(keyOf).map(node => [`${node.nodeName} ${keyOf(node)}`, node])), plain = mine.filter(node => !keyOf(node));
  let place = 0;
  const partners = fresh.map((node, index) => {
    if (keyOf(node)) return keyed.get(`${node.nodeName} ${keyOf(node)}`);
    // Without a key: by order. If the old node's kind appears later in the new page, this node was added, else removed.
    for (; place < plain.length; place++) {
      if (plain[place].nodeName === node.nodeName) return plain[place++];
      if (fresh.slice(index + 1).some(later => !keyOf(later) && later.nodeName === plain[place].nodeName)) return undefined;
    }
    return undefined;
  });
  if (held) {
    const solid = mine.filter(node => !isBlank(node)), wanted = partners.filter((_, index) => !isBlank(fresh[index]));
    const same = solid.length === wanted.length && solid.every((node, index) => node === wanted[index]);
    // The content of a row may change freely, because its key is the same.
    partners.forEach((partner, index) => { if (partner && (same || keyOf(partner))) update(partner, fresh[index], partner.dataset?.key === undefined); });
    if (!same) {
      waiting = true;
      for (const row of solid) if (row.dataset?.key && !partners.includes(row)) row.dataset.gone = "";
    }
    return;
  }
  const result = partners.map((partner, index) => partner ? update(partner, fresh[index], held) : copy(fresh[index]));
  for (const node of mine) if (!result.includes(node)) node.remove();
  let at = old.firstChild;
  for (const node of result) if (node === at) at = at.nextSibling; else old.insertBefore(node, at);
}
function update(mine, node, held) {
  if (mine.nodeType === Node.TEXT_NODE) { if (mine.data !== node.data) mine.data = node.data; }
  else if (mine.nodeType === Node.ELEMENT_NODE && mine.id !== "stale" && !(mine.classList.contains("say") && mine.dataset.told)) {
    for (const { name, value } of node.attributes) if (mine.getAttribute(name) !== value && name !== "open") mine.setAttribute(name, value);
    for (const { name } of [...mine.attributes]) if (!node.hasAttribute(name) && !["open", "tabindex", "data-unfolded", "data-at", "data-utc"].includes(name)) mine.removeAttribute(name);
    morph(mine, node, held);
  }
  return mine;
}
function copy(node) { // added details start closed
  const made = node.cloneNode(true);
  if (made.nodeType === Node.ELEMENT_NODE) for (const details of made.querySelectorAll("details")) details.open = false;
  return made;
}
// Merge ``next`` into ``main``. Return whether rows wait for a full update.
export function merge(main, next, held) {
  waiting = false;
  morph(main, next, held);
  return waiting;
}
