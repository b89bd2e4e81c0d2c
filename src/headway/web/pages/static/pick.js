// The boxes that select items, and the button with their number.
const all = selector => [...document.querySelectorAll(selector)], number = new Intl.NumberFormat("en");
function picked() {
  const count = all("[name=item]:checked").length;
  for (const button of all("[data-picks]")) { button.textContent = count ? `Retry ${number.format(count)} selected` : "Retry selected"; button.disabled = !count; }
}
function wire() {
  for (const box of all("[data-pick-all]")) { box.className = ""; box.onchange = () => { for (const one of all("[name=item]")) one.checked = box.checked; picked(); }; }
  for (const box of all("[name=item]")) box.onchange = picked;
  if (all("[name=item]").length) picked();
}
wire();
document.addEventListener("renewed", wire);
