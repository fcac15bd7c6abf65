// A field above the first long table of a page shows only those rows of long tables that hold every word typed.
// A result of the site's search brings its words along, as ?h=. Without this script, the tables are whole.
const longTables = [...document.querySelectorAll("article table")].filter((table) => table.tBodies[0]?.rows.length >= 12);

if (longTables.length) {
  const rows = longTables.flatMap((table) => [...table.tBodies[0].rows]);
  const field = Object.assign(document.createElement("input"), { type: "search", placeholder: "Filter rows" });
  const told = document.createElement("output");
  const place = document.createElement("p");
  place.className = "row-filter";
  field.setAttribute("aria-label", "Show only rows of the tables with these words");
  place.append(field, " ", told);
  (longTables[0].closest(".md-typeset__scrollwrap") ?? longTables[0]).before(place);

  const show = () => {
    const words = field.value.toLowerCase().split(/\s+/);
    for (const row of rows) row.hidden = !words.every((word) => row.textContent.toLowerCase().includes(word));
    told.textContent = field.value.trim() ? `${rows.filter((row) => !row.hidden).length} of ${rows.length} rows` : "";
  };
  field.addEventListener("input", show);
  field.value = new URLSearchParams(location.search).get("h") ?? "";
  show();
  if (rows.every((row) => row.hidden)) {
    field.value = ""; // the words are elsewhere on the page
    show();
  }
}
