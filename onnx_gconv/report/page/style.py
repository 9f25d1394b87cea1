"""The look of the page: one column, the colours of the palette, light or dark as the reader's system is, and on paper."""

from onnx_gconv.report.page.palette import DARK, LIGHT, css_variables

STYLE = f"""
:root {{ color-scheme: light dark; {css_variables(LIGHT)} }}
@media (prefers-color-scheme: dark) {{ :root {{ {css_variables(DARK)} }} }}
* {{ box-sizing: border-box; }}
body {{ margin: 0; background: var(--ground); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }}
main, header {{ max-width: 864px; margin: 0 auto; padding: 0 16px; }}
header {{ padding-top: 32px; }}
main {{ padding-bottom: 64px; }}
h1, h2, h3 {{ line-height: 1.25; overflow-wrap: anywhere; text-wrap: balance; }}
h1 {{ font-size: 28px; margin: 0 0 8px; }}
h2 {{ font-size: 22px; margin: 56px 0 8px; padding-top: 16px; border-top: 1px solid var(--line); }}
h3 {{ font-size: 17px; margin: 36px 0 8px; }}
p {{ margin: 8px 0; max-width: 70ch; overflow-wrap: anywhere; }}
.lead, figcaption {{ color: var(--muted); }}
code {{ font: 0.9em ui-monospace, monospace; overflow-wrap: anywhere; }}
a {{ color: var(--after); }}
nav ul {{ display: flex; flex-wrap: wrap; gap: 4px 20px; margin: 16px 0 0; padding: 0; list-style: none; overflow-wrap: anywhere; }}
nav a {{ display: inline-block; padding: 4px 0; }}
.scroll {{ overflow-x: auto; margin: 12px 0; }}
table {{ border-collapse: collapse; font-size: 14px; font-variant-numeric: tabular-nums; }}
th, td {{ padding: 5px 14px 5px 0; border-bottom: 1px solid var(--line); text-align: left; vertical-align: baseline; }}
th:last-child, td:last-child {{ padding-right: 4px; }}
thead th {{ color: var(--muted); font-weight: 600; }}
tbody th {{ font-weight: 400; }}
.word {{ overflow-wrap: break-word; }}
.number {{ text-align: right; white-space: nowrap; }}
figure {{ margin: 12px 0 20px; }}
figcaption {{ font-size: 14px; max-width: 80ch; }}
.chart svg {{ display: block; width: 100%; height: auto; }}
.chart svg * {{ stroke-linejoin: round; stroke-linecap: butt; }}
.chart text {{ font-family: system-ui, sans-serif !important; }}
.chart image {{ image-rendering: pixelated; }}
.wide {{ max-width: 832px; }}
.narrow {{ max-width: 480px; }}
details {{ margin: 8px 0; }}
summary {{ cursor: pointer; padding: 4px 0; color: var(--after); overflow-wrap: anywhere; }}
:focus-visible {{ outline: 2px solid var(--after); outline-offset: 2px; }}
.note {{ border-left: 3px solid var(--third); padding-left: 12px; }}
@media screen and (max-width: 831px) {{
  .wide {{ display: none; }}
  th, td {{ padding-right: 10px; }}
  .number:last-child {{ white-space: normal; }}
}}
@media screen and (min-width: 832px) {{ .narrow {{ display: none; }} }}
@media print {{
  :root {{ color-scheme: light; {css_variables(LIGHT)} }}
  body {{ font-size: 11pt; }}
  main, header {{ max-width: none; padding: 0; }}
  nav, .narrow {{ display: none; }}
  h2, h3, summary {{ break-after: avoid; }}
  figure, tr {{ break-inside: avoid; }}
  details::details-content {{ content-visibility: visible; block-size: auto; }}
  .scroll {{ overflow: visible; }}
  a, summary {{ color: inherit; }}
}}
"""
