// Short code in running text, such as --ranks, is not broken at its hyphens. CSS cannot tell short from long.
for (const code of document.querySelectorAll("article :is(p, li) > code")) {
  if (code.textContent.length <= 24 && !code.closest("table")) code.style.whiteSpace = "nowrap";
}
