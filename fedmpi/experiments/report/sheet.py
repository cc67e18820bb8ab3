"""The style sheet of a report: for a desk, a phone, a dark room and paper."""

from __future__ import annotations

from .figures.style import DARK, FAINT, INK, PAPER, RULE

NARROW_PIXELS = 620  # pages up to this width have the pictures for a phone
LINK, DARK_LINK, TINT, DARK_TINT = "#1f5fa8", "#8dbcf7", "#f4f4f1", "#22252a"

CSS = f"""
:root {{ color-scheme: light dark; --ink: {INK}; --faint: {FAINT}; --rule: {RULE}; --paper: {PAPER};
  --link: {LINK}; --tint: {TINT}; --mark: #fdf0c3; --shade: #0003; --stripe: #0000000a }}
@media (prefers-color-scheme: dark) {{
  :root {{ --ink: {DARK[INK]}; --faint: {DARK[FAINT]}; --rule: {DARK[RULE]}; --paper: {DARK[PAPER]};
    --link: {DARK_LINK}; --tint: {DARK_TINT}; --mark: #4a3f16; --shade: #000b; --stripe: #ffffff0d }}
}}
* {{ box-sizing: border-box }}
html {{ -webkit-text-size-adjust: 100%; text-size-adjust: 100% }}
body {{ margin: 0 auto; padding: 2.5rem 1.25rem 4rem; max-width: 60rem; background: var(--paper); color: var(--ink);
  font: 1rem/1.55 system-ui, -apple-system, "Segoe UI", Roboto, "Noto Sans", "Liberation Sans", sans-serif;
  overflow-wrap: break-word }}
h1, h2, h3 {{ line-height: 1.2; font-weight: 650; text-wrap: balance }}
h1 {{ font-size: 1.9rem; margin: 0 0 .4rem; letter-spacing: -.01em }}
h2 {{ font-size: 1.3rem; margin: 3.2rem 0 .6rem; padding-top: 1rem; border-top: 1px solid var(--rule) }}
h3 {{ font-size: 1.02rem; margin: 1.8rem 0 .4rem }}
p, ul, ol, dl {{ max-width: 42rem; margin: .6rem 0 }}
a {{ color: var(--link); text-underline-offset: .15em }}
.lead {{ font-size: 1.08rem; color: var(--faint); margin: 0 0 1.2rem }}
.absent {{ color: var(--faint); font-style: italic }}
.facts {{ display: grid; grid-template-columns: max-content 1fr; gap: .15rem 1.2rem; margin: 1.2rem 0 }}
.facts dt {{ color: var(--faint) }}
.facts dd {{ margin: 0; min-width: 0 }}
nav ol {{ columns: 2; column-gap: 2.5rem; padding-left: 1.5rem; margin: .4rem 0 0 }}
nav li {{ break-inside: avoid; padding: .1rem 0 }}
figure {{ margin: 1.3rem 0 1.8rem }}
figure img {{ display: block; width: 100%; height: auto }}
figure.plain img {{ background: #fff; border-radius: 3px; padding: .4rem; width: auto; max-width: 100% }}
figcaption, .note {{ font-size: .88rem; line-height: 1.45; color: var(--faint); margin-top: .5rem; max-width: 46rem }}
.table figcaption {{ margin: 0 0 .4rem; color: var(--ink); font-weight: 600 }}
.scroll {{ overflow-x: auto; max-width: 100%; background: no-repeat var(--paper);
  background-image: linear-gradient(var(--paper), var(--paper)), linear-gradient(var(--paper), var(--paper)),
    linear-gradient(to right, var(--shade), transparent), linear-gradient(to left, var(--shade), transparent);
  background-position: 0 0, 100% 0, 0 0, 100% 0; background-size: 1.5rem 100%, 1.5rem 100%, .8rem 100%, .8rem 100%;
  background-attachment: local, local, scroll, scroll }}
.scroll:focus-visible {{ outline: 2px solid var(--link); outline-offset: 2px }}
table {{ border-collapse: collapse; font-size: .88rem; line-height: 1.4;
  font-variant-numeric: tabular-nums lining-nums }}
th, td {{ padding: .3rem .5rem; text-align: left; vertical-align: baseline; white-space: nowrap }}
th:first-child, td:first-child {{ padding-left: 0 }}
th:last-child, td:last-child {{ padding-right: 0 }}
td.n, th.n {{ text-align: right }}
td.long, th.long {{ white-space: normal; min-width: 16rem }}
thead th {{ border-top: 2px solid var(--ink); border-bottom: 1px solid var(--ink); font-weight: 600 }}
tbody tr:last-child > * {{ border-bottom: 2px solid var(--ink) }}
tbody th {{ font-weight: 400 }}
tbody tr:nth-child(even) {{ background: var(--stripe) }}
mark {{ background: var(--mark); color: inherit; font-weight: 600; padding: 0 .15em }}
details {{ margin: 1rem 0 }}
summary {{ cursor: pointer; color: var(--link) }}
code, pre {{ font: .86em/1.5 ui-monospace, "Cascadia Mono", "DejaVu Sans Mono", Menlo, monospace }}
pre code {{ font-size: 1em }}
pre {{ background: var(--tint); padding: .8rem 1rem; border-radius: 3px; overflow-x: auto }}
code {{ overflow-wrap: anywhere }}
@media (max-width: {NARROW_PIXELS}px) {{
  body {{ padding: 1.5rem 1rem 3rem }}
  h1 {{ font-size: 1.5rem }}
  nav ol {{ columns: 1 }}
  nav ol, ul {{ padding-left: 1.4rem }}
}}
@media print {{
  :root {{ --ink: #000; --faint: #333; --rule: #bbb; --paper: #fff; --link: #000; --tint: #fff; --stripe: #fff;
    --mark: #e6e6e6 }}
  @page {{ margin: 16mm }}
  body {{ max-width: none; padding: 0; font-size: 10pt }}
  h2, h3, .table figcaption {{ break-after: avoid }}
  figure, tr {{ break-inside: avoid }}
  .scroll {{ overflow: visible; background: none }}
  table {{ font-size: 7pt }}
  th, td {{ padding: .1rem .3rem; white-space: normal }}
  td.long, th.long {{ min-width: 8rem }}
  pre {{ white-space: pre-wrap }}
  a {{ text-decoration: none }}
}}
"""
