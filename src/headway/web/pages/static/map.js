// The item map: the pointer or arrow keys select a cell, Enter or a click opens its items.
const number = new Intl.NumberFormat("en");
function wire() {
  for (const box of document.querySelectorAll("[data-mapdata]")) {
    const say = box.parentElement.querySelector(".say"), idle = say.dataset.told ? say.cloneNode(true) : [...say.childNodes].map(node => node.cloneNode(true));
    const data = JSON.parse(box.dataset.mapdata), bases = data.bases.flatMap(([name, length]) => Array(length).fill(name));
    for (const svg of box.querySelectorAll("[data-map]")) {
      if (svg.dataset.wired === box.dataset.mapdata) continue;
      svg.dataset.wired = box.dataset.mapdata;
      const columns = +svg.dataset.map, height = +svg.dataset.h, cursor = svg.querySelector(".cur"), rows = Math.ceil(data.cells / columns);
      const label = svg.getAttribute("aria-label");
      let at = -1;
      const show = cell => {
        if (cell < 0 || cell >= data.cells) return;
        at = cell;
        const from = cell * data.size, to = from + data.size - 1, [retrying = 0, processing = 0, dead = 0] = data.marks[cell] || [];
        const told = [[dead, "dead"], [retrying, "retrying"], [processing, "processing"]].filter(([count]) => count).map(([count, word]) => `${count} ${word}`);
        const head = data.size === 1 ? `Item ${number.format(from)}` : `Items ${number.format(from)} to ${number.format(to)}`;
        const text = data.size === 1 && told.length ? told[0].slice(2) : [`${data.size === 1 ? "" : "mostly "}${bases[cell]}`, ...told].join(", ");
        cursor.setAttribute("x", cell % columns * 10); cursor.setAttribute("y", Math.floor(cell / columns) * height); cursor.setAttribute("visibility", "visible");
        const link = Object.assign(document.createElement("a"), { href: `${box.dataset.items}?from=${from}${dead ? "&state=dead" : ""}`, textContent: dead ? "Open dead items" : "Open items" });
        say.dataset.told = "1";
        say.replaceChildren(Object.assign(document.createElement("b"), { textContent: head }), `  ${text}  `, link);
        svg.setAttribute("aria-label", `${head}: ${text}`);
      };
      const cellAt = event => { const box = svg.getBoundingClientRect(); return Math.min(columns - 1, Math.floor((event.clientX - box.left) / box.width * columns)) + columns * Math.floor((event.clientY - box.top) / box.height * rows); };
      const rest = () => { if (document.activeElement !== svg) { delete say.dataset.told; say.replaceChildren(...[idle].flat().map(node => node.cloneNode(true))); cursor.setAttribute("visibility", "hidden"); svg.setAttribute("aria-label", label); } };
      svg.setAttribute("tabindex", "0"); svg.setAttribute("role", "application");
      svg.addEventListener("pointermove", event => show(cellAt(event)));
      svg.addEventListener("pointerleave", event => { if (!event.relatedTarget || !say.contains(event.relatedTarget)) setTimeout(() => { if (!say.matches(":hover")) rest(); }, 1500); });
      svg.addEventListener("focus", () => at < 0 && show(0));
      svg.addEventListener("click", event => { show(cellAt(event)); say.querySelector("a").click(); });
      svg.addEventListener("keydown", event => {
        const dead = step => { for (let cell = at + step; cell >= 0 && cell < data.cells; cell += step) if (data.marks[cell]?.[2]) return cell; return at; };
        const to = { ArrowRight: at + 1, ArrowLeft: at - 1, ArrowDown: at + columns, ArrowUp: at - columns, Home: 0, End: data.cells - 1 }[event.key] ?? (event.key === "x" ? dead(1) : event.key === "X" ? dead(-1) : undefined);
        if (to !== undefined) { show(to); event.preventDefault(); }
        if (event.key === "Enter") say.querySelector("a")?.click();
      });
    }
  }
}
wire();
document.addEventListener("renewed", wire);
