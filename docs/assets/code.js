// Short code in running text, such as --ranks, is not broken at its hyphens. CSS cannot tell short from long.
for (const code of document.querySelectorAll("article :is(p, li) > code")) {
  if (code.textContent.length <= 24 && !code.closest("table")) code.style.whiteSpace = "nowrap";
}

// What is copied of a diff is the new script. The theme copies this attribute in place of the text.
for (const code of document.querySelectorAll(".language-diff code")) {
  const kept = code.textContent.split("\n").filter((line) => !line.startsWith("-"));
  code.dataset.copy = kept.map((line) => line.slice(1)).join("\n");
}
