"""`shardpass plan --page`: a plan as one HTML file with sliders, which needs nothing but a browser."""

from __future__ import annotations

import html
import json
from string import Template

import shardpass as sp
from shardpass.cli.planning import COLOURS, row_of, segments
from shardpass.core.ranks import MODES

_PAGE = """\
<!doctype html>
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>$title: memory per rank</title>
<style>
:root { color-scheme: light dark; --ink: light-dark(#1c1c1c, #ececec); --faint: light-dark(#5a5a5a, #b0b0b0);
  --paper: light-dark(#ffffff, #1b1d20); --line: light-dark(#d0d0d0, #4a4d52); --good: light-dark(#e4f2e4, #22402a);
  --bad: light-dark(#f8e3e0, #54231f); }
body { font: 16px/1.5 system-ui, sans-serif; max-width: 62rem; margin: 2rem auto; padding: 0 1rem; color: var(--ink);
  background: var(--paper); }
h1 { font-size: 1.5rem; margin: 0; }
label { display: block; margin-top: 1rem; }
input { width: 100%; }
#verdict { font-size: 1.15rem; font-weight: 600; background: var(--good); padding: .6rem .8rem; border-radius: .4rem; }
#verdict.none { background: var(--bad); }
.bars { position: relative; margin: 1rem 0; }
.bar { display: flex; align-items: center; margin: .35rem 0; }
.bar > span { flex: 0 0 4rem; }
.track { flex: 1; display: flex; height: 1.6rem; position: relative; }
.track div { flex: none; }
.track span { padding-left: .5rem; white-space: nowrap; font-size: .9rem; }
.budget { position: absolute; top: -.2rem; bottom: -.2rem; border-left: 2px dashed var(--ink); }
.legend span { display: inline-block; margin-right: 1rem; white-space: nowrap; }
.legend i { display: inline-block; width: .9rem; height: .9rem; margin-right: .3rem; vertical-align: -.1rem; }
.scroll { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; }
caption { text-align: left; padding: .4rem 0; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .6rem; text-align: right; white-space: nowrap; }
tr.large { color: var(--faint); }
tr.best { font-weight: 700; background: var(--good); }
p.note { color: var(--faint); }
</style>
<h1>Memory per rank</h1>
<p>$title</p>
<label for="ranks">Ranks: <output id="ranks-text"></output></label>
<input id="ranks" type="range" min="0" step="1">
<label for="budget">Budget per rank: <output id="budget-text"></output></label>
<input id="budget" type="range" min="0" max="200" step="1">
<p id="verdict" role="status"></p>
<div class="bars" id="bars"></div>
<p class="legend" id="legend"></p>
<div class="scroll" tabindex="0" role="region" aria-label="All estimates">
<table id="table"><caption>Estimated memory per rank, of each number of ranks and mode</caption></table>
</div>
<p class="note">Estimates of shardpass plan. The mode to take is the one with the least work and traffic of those that
fit. $assumed $left_out</p>
<script>
const PLAN = $plan;
const STEPS = 200;  // of the budget; the last one is no budget

function fixed(number, digits) {  // as Python rounds: halves to even
  const scaled = number * 10 ** digits, floor = Math.floor(scaled);
  const whole = scaled - floor === 0.5 ? floor + floor % 2 : Math.round(scaled);
  return (whole / 10 ** digits).toFixed(digits);
}
function bytesText(count) {
  for (const unit of ["B", "KiB", "MiB"]) {
    if (Math.abs(count) < 1024) return fixed(count, unit === "B" ? 0 : 1) + " " + unit;
    count /= 1024;
  }
  return fixed(count, 2) + " GiB";
}
function ranksText(count) { return count + (count > 1 ? " ranks" : " rank"); }
function precedes(a, b) {
  for (const key of ["seconds", "peak", "order"]) if (a[key] !== b[key]) return a[key] < b[key];
  return false;
}
function fits(row, budget) { return budget === null || row.peak <= budget; }
function best(budget) {
  let found = null;
  for (const row of PLAN.rows) if (fits(row, budget) && (found === null || precedes(row, found))) found = row;
  return found;
}
function verdict(budget) {
  const row = best(budget);
  if (row !== null) {
    const within = budget === null ? "" : " of " + bytesText(budget);
    return "Take " + ranksText(row.ranks) + " in mode " + row.mode + ": " + bytesText(row.peak) + within + " per rank.";
  }
  const least = PLAN.rows.reduce((a, b) => (b.peak < a.peak ? b : a));
  return "Nothing fits " + bytesText(budget) + " per rank. The smallest is " + bytesText(least.peak) + ", on " +
    ranksText(least.ranks) + " in mode " + least.mode + ".";
}
function budgetAt(step) {
  const peaks = PLAN.rows.map((row) => row.peak), low = Math.min(...peaks) / 2, high = Math.max(...peaks) * 2;
  return step >= STEPS ? null : Math.round(low * (high / low) ** (step / (STEPS - 1)));
}
function add(parent, tag, text) {
  const node = parent.appendChild(document.createElement(tag));
  if (text !== undefined) node.textContent = text;
  return node;
}
function showBars(ranks, budget) {
  const box = document.getElementById("bars");
  const widest = Math.max(...PLAN.rows.map((row) => row.peak)) * 1.4;  // with room for a number
  box.replaceChildren();
  for (const row of PLAN.rows.filter((row) => row.ranks === ranks)) {
    const bar = add(box, "div");
    bar.className = "bar";
    add(bar, "span", row.mode);
    const track = add(bar, "div");
    track.className = "track";
    track.setAttribute("role", "img");
    track.setAttribute("aria-label", row.mode + " on " + ranksText(ranks) + ": " + bytesText(row.peak));
    for (const [term, count] of Object.entries(row.segments)) {
      const piece = add(track, "div");
      piece.style.cssText = "background:" + PLAN.colours[term] + ";width:" + 100 * count / widest + "%";
      piece.title = term + ": " + bytesText(count);
    }
    add(track, "span", bytesText(row.peak));
    if (budget !== null && budget < widest) {
      const line = add(track, "div");
      line.className = "budget";
      line.style.left = 100 * budget / widest + "%";
    }
  }
}
function showTable(budget) {
  const table = document.getElementById("table"), take = best(budget);
  table.querySelectorAll("thead, tbody").forEach((part) => part.remove());
  const terms = Object.keys(PLAN.rows[0].terms), head = add(add(table, "thead"), "tr"), body = add(table, "tbody");
  for (const name of ["ranks", "mode", "peak", "", ...terms, "loading", "fetched/epoch"]) add(head, "th", name);
  for (const row of PLAN.rows) {
    const line = add(body, "tr");
    line.className = row === take ? "best" : fits(row, budget) ? "" : "large";
    const mark = row === take ? "take" : fits(row, budget) ? "" : "too large";
    const counts = [...terms.map((term) => row.terms[term]), row.loading, row.fetched];
    const cells = [row.ranks, row.mode, bytesText(row.peak), mark, ...counts.map(bytesText)];
    for (const cell of cells) add(line, "td", cell);
  }
}
function start() {
  const ranks = [...new Set(PLAN.rows.map((row) => row.ranks))];
  const ranksSlider = document.getElementById("ranks"), budgetSlider = document.getElementById("budget");
  let budget = PLAN.budget;
  const show = () => {
    const chosen = ranks[ranksSlider.value];
    document.getElementById("ranks-text").textContent = chosen;
    document.getElementById("budget-text").textContent = budget === null ? "no bound" : bytesText(budget);
    document.getElementById("verdict").textContent = verdict(budget);
    document.getElementById("verdict").className = best(budget) === null ? "none" : "";
    showBars(chosen, budget);
    showTable(budget);
  };
  const first = best(budget);
  ranksSlider.max = ranks.length - 1;
  ranksSlider.value = first === null ? ranks.length - 1 : ranks.indexOf(first.ranks);
  budgetSlider.value = STEPS;
  for (let step = STEPS - 1; budget !== null && step >= 0; step--) {
    if (budgetAt(step) >= budget) budgetSlider.value = step;
  }
  for (const [term, colour] of Object.entries(PLAN.colours)) {
    if (!PLAN.rows.some((row) => term in row.segments)) continue;
    const item = add(document.getElementById("legend"), "span");
    add(item, "i").style.background = colour;
    item.append(term);
  }
  ranksSlider.addEventListener("input", show);
  budgetSlider.addEventListener("input", () => { budget = budgetAt(Number(budgetSlider.value)); show(); });
  show();
}
if (typeof document !== "undefined") start();
</script>
</html>
"""


def plan_page(planned: sp.Plan, title: str) -> str:
    """The page, as text. Its table and what it recommends are those of `planned`, for any budget on the slider.

    Raises:
        ValueError: the plan has no rows.
    """
    if not planned.rows:
        raise ValueError(planned.verdict)
    rows = [{**row_of(row), "segments": segments(row), "order": MODES.index(row.mode)} for row in planned.rows]
    data = json.dumps({"budget": planned.budget, "rows": rows, "colours": COLOURS}).replace("</", "<\\/")
    left_out = " ".join(f"{mode}: {reason}." for mode, reason in planned.left_out.items())
    told = {"assumed": html.escape(planned.assumed), "left_out": html.escape(left_out)}
    return Template(_PAGE).substitute(title=html.escape(title), plan=data, **told)
