"""How the page looks: one style sheet, dark and light, from a phone's width on."""

from __future__ import annotations

ICON = (
    '<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 32 32"><rect width="32" height="32" rx="7" fill="#2f6fe0"/>'
    '<path d="M6 23 C12 23 11 9 16 9 S20 23 26 23" fill="none" stroke="#fff" stroke-width="3.4" stroke-linecap="round"/></svg>'
)

# Words have the darker shades on light ground and the brighter ones on dark, so that small text can be read on both.
CSS = """
:root { --good: #0d7a54; --bad: #c62a2f; --warn: #8f5d00; --deep: #6a45d1; --cool: #0b7285; --calm: #5d6673; --main: #2f6fe0;
        --page: #f4f6f9; --card: #fff; --ink: #1c2530; --soft: #5d6673; --edge: #dfe4ea; }
.body--dark { --good: #3ecf96; --bad: #ff7a7e; --warn: #f0ad3c; --deep: #ab92ff; --cool: #45c4d4; --calm: #97a1af; --main: #4c8dff;
              --page: #10141a; --card: #181e26; --ink: #e3e8ef; --soft: #9aa4b2; --edge: #29323d; }
body { background: var(--page); color: var(--ink); font-family: system-ui, "Roboto", sans-serif; }
.nicegui-content { padding: 12px; gap: 12px; max-width: 1320px; margin: 0 auto; align-items: stretch; }
.q-header { background: var(--card) !important; color: var(--ink) !important; border-bottom: 1px solid var(--edge); }
.brand { font-weight: 700; letter-spacing: .02em; color: var(--ink); text-decoration: none; font-size: 1.1rem; }
.crumb { color: var(--soft); overflow: hidden; text-overflow: ellipsis; white-space: nowrap; min-width: 0; }
h1.crumb { font-size: 1rem; font-weight: 400; margin: 0; line-height: 1.6; }
.grid { display: grid; grid-template-columns: repeat(2, minmax(0, 1fr)); gap: 12px; width: 100%; }
.wide { grid-column: 1 / -1; }
.card { background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 10px 12px 6px; min-width: 0; width: 100%;
        gap: 2px; display: flex; flex-direction: column; }
.card h2 { font-size: .95rem; font-weight: 600; margin: 0; line-height: 1.5; }
.card .note { color: var(--soft); font-size: .8rem; }
.away { position: absolute; left: 0; top: 0; width: 320px; visibility: hidden; pointer-events: none; }
.chart { width: 100%; height: auto; min-height: 260px; flex: 1 1 auto; }
.key { display: flex; flex-wrap: wrap; gap: 2px 16px; }
.key i { display: inline-block; height: .8em; border-left: 2px solid; margin-right: 6px; }
.zoom { display: grid; grid-template-columns: minmax(0, 190px) minmax(60px, 1fr) auto; gap: 4px 18px; align-items: center; width: 100%; }
.jobs { display: grid; gap: 8px; list-style: none; margin: 0; padding: 0; }
.job { display: grid; grid-template-columns: minmax(0, 2.2fr) 92px repeat(4, minmax(0, 1fr)); gap: 6px 10px; align-items: center;
       background: var(--card); border: 1px solid var(--edge); border-radius: 10px; padding: 10px 14px; color: var(--ink);
       text-decoration: none; font-variant-numeric: tabular-nums; }
.job:hover { border-color: var(--main); }
:is(.job, .brand, .events, .hosts, .log):focus-visible { outline: 2px solid var(--main); outline-offset: 2px; }
.job b { overflow: hidden; text-overflow: ellipsis; white-space: nowrap; display: block; }
.job small, .fact small { color: var(--soft); display: block; font-size: .75rem; overflow: hidden; text-overflow: ellipsis; white-space: nowrap; }
.chip { border-radius: 999px; padding: 1px 10px; font-size: .78rem; border: 1px solid currentColor; text-align: center; white-space: nowrap; }
.good { color: var(--good); } .bad { color: var(--bad); } .warn { color: var(--warn); } .deep { color: var(--deep); }
.cool { color: var(--cool); } .calm { color: var(--calm); }
.facts { display: flex; flex-wrap: wrap; gap: 8px 26px; }
.fact { font-variant-numeric: tabular-nums; font-size: 1.05rem; font-weight: 600; max-width: 100%; }
.fact small { font-weight: 400; }
.hosts { display: grid; gap: 6px; max-height: 300px; overflow-y: auto; align-content: start; }
.host { display: grid; grid-template-columns: minmax(70px, 130px) minmax(0, 1fr); gap: 8px; align-items: center; font-size: .78rem; color: var(--soft); }
.squares { display: flex; flex-wrap: wrap; gap: 3px; }
.square { min-width: 13px; height: 20px; padding: 0 4px; border-radius: 4px; background: #2f6fe0; color: #fff; font-size: .7rem;
          line-height: 20px; text-align: center; }
.square.small { min-width: 9px; height: 9px; padding: 0; }
.events { max-height: 300px; overflow-y: auto; font-size: .84rem; list-style: none; margin: 0; padding: 0; }
.event { border-left: 3px solid currentColor; padding: 2px 10px; margin: 5px 0; }
.event span { color: var(--ink); } .event small { color: var(--soft); display: block; overflow-wrap: anywhere; }
.log { display: flex; flex-direction: column-reverse; max-height: 340px; overflow: auto; width: 100%; }
.log pre { margin: 0; font-size: .76rem; line-height: 1.45; white-space: pre-wrap; overflow-wrap: anywhere; }
.chart-tip { background: var(--card) !important; border-color: var(--edge) !important; color: var(--ink) !important;
             max-width: 300px; white-space: normal !important; }
.event-tip { border-left: 3px solid; padding-left: 8px; margin-top: 6px; overflow-wrap: anywhere; }
.q-card, .q-dialog .q-card { background: var(--card); color: var(--ink); }
@media (max-width: 760px) {
  .grid { grid-template-columns: minmax(0, 1fr); }
  .job { grid-template-columns: repeat(4, minmax(0, 1fr)); }
  .job > :first-child { grid-column: 1 / 4; }
  .zoom { grid-template-columns: minmax(0, 1fr) auto; } .zoom > :nth-child(2) { grid-row: 2; grid-column: 1 / -1; }
  .nicegui-content { padding: 8px; }
  .chart { min-height: 220px; }
}
"""
