// Single keys: g and a letter opens a page, j and k move along rows, x selects, r retries, p pauses, ? lists them.
const $ = (selector, root = document) => root.querySelector(selector), $$ = (selector, root = document) => [...root.querySelectorAll(selector)];
let going = 0;
export function press(key) {
  if (key === "?") { const about = $$("footer a").find(link => link.textContent === "About"); if (about) location.href = about.href; return; }
  const link = going && Date.now() - going < 1000 ? $(`[data-go="${CSS.escape(key)}"]`) : null;
  going = key === "g" ? Date.now() : 0;
  if (link) { location.href = link.href; return; }
  if (key === "j" || key === "k") {
    const rows = $$("main tbody tr, main .cz, main .al li").map(row => $("summary, th a, a", row)).filter(Boolean), at = rows.indexOf(document.activeElement);
    rows[Math.max(0, Math.min(rows.length - 1, at + (key === "j" ? 1 : -1)))]?.focus();
  }
  const row = document.activeElement?.closest("tr, .cz, section") || document;
  if (key === "x") $("[name=item]", row)?.click();
  if (key === "r" || key === "p") (key === "r" && $("button[data-picks]:not(:disabled)") || $$("button[commandfor]", row).concat($$("main button[commandfor]")).find(button => button.textContent.startsWith(key === "r" ? "Re" : "Pause") && !button.closest("dialog")))?.click();
}
// The page About switches them off.
for (const button of $$("[data-keys]")) {
  const isOff = () => { try { return localStorage.keys === "off"; } catch { return false; } };
  const say = () => { button.textContent = isOff() ? "Enable single-key shortcuts" : "Disable single-key shortcuts"; };
  button.hidden = false;
  button.onclick = () => { try { localStorage.keys = isOff() ? "on" : "off"; } catch { /* private mode */ } say(); };
  say();
}
