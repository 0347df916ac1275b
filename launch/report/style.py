"""Holds the page's style sheet; colours follow the reader's light or dark setting."""

CSS = """
:root {
  color-scheme: light dark;
  --page: #f7f7f5; --card: #ffffff; --ink: #1d2023; --soft: #62686f; --line: #e4e4e0;
  --c0: #2563c9; --c1: #c8620a; --c2: #1c8a5b; --c3: #8a4fbf;
  --good: #18794e; --bad: #c2353f; --act: 37, 99, 201; --up: 24, 140, 92;
  --down: 214, 69, 65; --rare: 138, 79, 191;
  --mono: ui-monospace, 'SF Mono', 'Cascadia Mono', Menlo, Consolas, monospace;
}
@media (prefers-color-scheme: dark) {
  :root {
    --page: #101214; --card: #181b1e; --ink: #e7e7e3; --soft: #989fa6; --line: #2a2e32;
    --c0: #74a9ff; --c1: #f2a154; --c2: #58c490; --c3: #c295ee;
    --good: #58c490; --bad: #f27d80; --act: 116, 169, 255; --up: 72, 190, 132;
    --down: 240, 105, 105; --rare: 186, 136, 240;
  }
}
* { box-sizing: border-box; }
body {
  margin: 0; background: var(--page); color: var(--ink);
  font: 15px/1.5 system-ui, -apple-system, 'Segoe UI', Roboto, sans-serif;
}
main { max-width: 1120px; margin: 0 auto; padding: 36px 24px 64px; }
h1 { font-size: 26px; line-height: 1.2; margin: 0; letter-spacing: -.015em; }
h2 { font-size: 17px; margin: 44px 0 12px; letter-spacing: -.005em; }
h2 small { font-weight: 400; color: var(--soft); font-size: 14px; margin-left: 8px; }
.sub { color: var(--soft); margin: 6px 0 0; overflow-wrap: anywhere; }
.head { display: flex; gap: 14px; align-items: center; flex-wrap: wrap; }
.pill {
  font-size: 12px; font-weight: 600; padding: 2px 10px; border-radius: 99px;
  color: var(--soft); border: 1px solid var(--line); background: var(--card);
}
.pill.finished { color: var(--good); } .pill.failed { color: var(--bad); }
.pill.running::before { content: '● '; color: var(--c0); }
.card { background: var(--card); border: 1px solid var(--line); border-radius: 10px; }
.tiles {
  display: grid; grid-template-columns: repeat(auto-fit, minmax(170px, 1fr));
  gap: 12px; margin-top: 24px;
}
.tile { padding: 14px 16px; }
.tile b {
  display: block; font-size: 25px; line-height: 1.25; font-weight: 600;
  letter-spacing: -.02em; font-variant-numeric: tabular-nums; white-space: nowrap;
}
.tile b i { font-style: normal; color: var(--soft); font-weight: 400; }
.tile > span { color: var(--soft); font-size: 13px; }
.good { color: var(--good); } .bad { color: var(--bad); }
.hero { padding: 16px 18px 10px; }
.grid {
  display: grid; gap: 12px; margin-top: 12px;
  grid-template-columns: repeat(auto-fill, minmax(310px, 1fr));
}
.plot { padding: 11px 12px 6px; margin: 0; }
.plot figcaption, .hero figcaption {
  display: flex; justify-content: space-between; gap: 8px; font-size: 13px;
  margin-bottom: 5px;
}
.hero { margin: 0; }
.name { color: var(--soft); overflow-wrap: anywhere; }
.read { font-variant-numeric: tabular-nums; font-weight: 600; white-space: nowrap; }
.read em { font-style: normal; font-weight: 400; color: var(--soft); }
.key { display: inline-block; margin-right: 14px; }
.key::before {
  content: ''; display: inline-block; width: 10px; height: 10px; border-radius: 3px;
  margin-right: 6px; background: var(--tone);
}
svg { display: block; width: 100%; height: auto; overflow: visible; }
svg text { font: 10px system-ui, sans-serif; fill: var(--soft); }
.hero svg text { font-size: 8px; }
.active line.cross { display: inline; }
line.grid { stroke: var(--line); stroke-width: 1; }
.plot line, .hero line, svg path { vector-effect: non-scaling-stroke; }
line.cross { display: none; stroke: var(--soft); stroke-dasharray: 2 2; }
.line { fill: none; stroke: var(--tone); stroke-width: 1.8; stroke-linejoin: round; }
.faint { fill: none; stroke: var(--tone); stroke-width: 1; opacity: .24; }
.dots .faint { opacity: .75; stroke-width: 1.4; stroke-dasharray: 4 3; }
.dots circle { fill: var(--card); stroke: var(--tone); stroke-width: 2; }
.lost { fill: var(--bad); }
.spot { fill: var(--tone); stroke: var(--card); stroke-width: 1.5; }
.c0 { --tone: var(--c0); } .c1 { --tone: var(--c1); }
.c2 { --tone: var(--c2); } .c3 { --tone: var(--c3); }
table { border-collapse: collapse; width: 100%; font-variant-numeric: tabular-nums; }
th, td { text-align: left; padding: 9px 16px; border-top: 1px solid var(--line); }
tr:first-child > * { border-top: 0; }
th { color: var(--soft); font-weight: 400; font-size: 13px; }
td.num, th.num { text-align: right; }
td small { color: var(--soft); }
.scroll { overflow-x: auto; }
.scroll + .grid { margin-top: 28px; }
.more { margin-top: 12px; } .more .grid { margin: 0 12px 12px; }
.more .note { margin: 0 14px 12px; } summary small { color: var(--soft);
  font-weight: 400; margin-left: 6px; }
.bar { width: 170px; min-width: 120px; }
.bar svg { height: 14px; width: 160px; }
.bar .track { stroke: var(--line); stroke-width: 4; stroke-linecap: round; }
.bar .gain { stroke-width: 4; stroke-linecap: round; stroke: currentColor; }
.bar .from { fill: var(--card); stroke: var(--soft); stroke-width: 2; }
.bar .to { fill: currentColor; }
.bars { padding: 12px 14px; display: flex; flex-wrap: wrap; gap: 10px 22px; }
.bars label, .bars .set { display: flex; align-items: center; gap: 8px; font-size: 13px;
  color: var(--soft); }
.seg { display: inline-flex; flex-wrap: wrap; border: 1px solid var(--line);
  border-radius: 8px; overflow: hidden; }
.seg button {
  font: inherit; font-size: 13px; border: 0; background: none; color: var(--soft);
  padding: 4px 11px; cursor: pointer; font-variant-numeric: tabular-nums;
}
.seg button + button { border-left: 1px solid var(--line); }
.seg button[aria-pressed=true] { background: rgba(var(--act), .14); color: var(--ink);
  font-weight: 600; }
.seg button:disabled { opacity: .4; cursor: default; }
button:focus-visible, [tabindex]:focus-visible { outline: 2px solid var(--c0);
  outline-offset: 1px; }
.sample { border-top: 1px solid var(--line); padding: 12px 16px 16px; }
.meta { display: flex; flex-wrap: wrap; gap: 2px 18px; font-size: 13px;
  color: var(--soft); margin-bottom: 8px; }
.meta b { color: var(--ink); font-weight: 600; }
.tokens { font: 13px/1.75 var(--mono); white-space: pre-wrap; overflow-wrap: anywhere;
  max-height: 420px; overflow-y: auto; }
.t { border-radius: 3px; padding: 1px 0; color: var(--soft);
  box-decoration-break: clone; -webkit-box-decoration-break: clone; }
.t.a { color: var(--ink); background: rgba(var(--tone), var(--v, 0)); }
.t.r { border-bottom: 2px solid var(--c1); }
.t:hover { outline: 1px solid var(--soft); }
.gap { color: var(--soft); font-style: italic; }
.tip { position: fixed; pointer-events: none; z-index: 9; padding: 8px 11px;
  font-size: 12px; line-height: 1.5; background: var(--card); color: var(--ink);
  border: 1px solid var(--line); border-radius: 8px; max-width: 280px;
  box-shadow: 0 4px 18px rgba(0, 0, 0, .16); font-variant-numeric: tabular-nums; }
.tip table { width: auto; } .tip td { border: 0; padding: 0 12px 0 0; }
.tip td:first-child { color: var(--soft); }
.legend { font-size: 13px; color: var(--soft); display: flex; gap: 8px;
  align-items: center; }
.ramp { width: 84px; height: 10px; border-radius: 3px; }
details { padding: 0; } details + details { margin-top: 12px; }
summary { cursor: pointer; padding: 11px 16px; font-weight: 600; font-size: 14px; }
dl { display: grid; grid-template-columns: minmax(110px, max-content) 1fr; margin: 0;
  padding: 2px 16px 14px; gap: 5px 22px; font-size: 13.5px; }
dt { color: var(--soft); overflow-wrap: anywhere; }
dd { margin: 0; overflow-wrap: anywhere; font-variant-numeric: tabular-nums; }
dd code, .sub code { font: 12.5px var(--mono); }
.note { color: var(--soft); font-size: 13px; margin: 10px 2px 0; }
.warn { color: var(--bad); font-size: 13.5px; margin: 14px 0 0; }
@media (max-width: 640px) {
  .hero svg text { font-size: 17px; }
  main { padding: 22px 14px 48px; } th, td { padding: 8px 10px; }
  .bar { display: none; }
}
@media print { .bars, .tip { display: none; } .tokens { max-height: none; } }
"""
