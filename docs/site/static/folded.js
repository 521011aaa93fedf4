// A link to a deeper section, or to a place in one, opens it: its text is folded behind its heading.

function openTarget() {
  const target = document.getElementById(decodeURIComponent(window.location.hash.slice(1)));
  const own = target?.closest("section")?.querySelector(":scope > details.deeper");
  let folded = own ?? target?.closest("details");
  if (!folded) return;
  for (; folded; folded = folded.parentElement.closest("details")) folded.open = true;
  target.scrollIntoView();
}

window.addEventListener("hashchange", openTarget);
openTarget();
