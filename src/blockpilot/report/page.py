"""The report as one HTML file that needs nothing else: styles and figures are inside."""

from html import escape

from blockpilot.report.content import Content, DrawnFigure, Section
from blockpilot.report.tables import Cell, Table

STYLE = """
:root { --ink: #1b1b1b; --soft: #5c5c5c; --rule: #c9c9c9; --even: #d6eaf8; --odd: #fbe5c8; }
* { box-sizing: border-box; }
html { font-size: 17px; }
body { margin: 2.5rem auto 5rem; padding: 0 1.25rem; max-width: 54rem; color: var(--ink); background: #fff;
  font-family: "Iowan Old Style", "Palatino Linotype", Palatino, "URW Palladio L", Georgia, serif; line-height: 1.5; }
h1 { font-size: 2rem; line-height: 1.15; margin: 0 0 .6rem; font-weight: 600; }
h2 { font-size: 1.35rem; margin: 3rem 0 .4rem; padding-top: .8rem; border-top: 2px solid var(--ink); font-weight: 600; }
h3 { font-size: 1.05rem; margin: 2.2rem 0 .3rem; font-weight: 600; }
p { margin: .5rem 0 .9rem; max-width: 44rem; }
.soft, figcaption, .legend { color: var(--soft); font-size: .87rem; }
.scroll { overflow-x: auto; margin: 1rem 0; }
table { border-collapse: collapse; font: .78rem/1.35 "Helvetica Neue", Helvetica, Arial, "Liberation Sans", sans-serif;
  font-variant-numeric: tabular-nums; border-top: 1.5px solid var(--ink); border-bottom: 1.5px solid var(--ink); }
th, td { padding: .22rem .5rem; text-align: right; white-space: nowrap; }
th { font-weight: 600; vertical-align: bottom; }
table.wide { font-size: .64rem; } table.wide :is(th, td) { padding: .18rem .26rem; }
table.wide th { white-space: normal; }
thead tr:last-child th { border-bottom: .75px solid var(--ink); }
thead .group { text-align: center; border-bottom: .75px solid var(--rule); }
.label { text-align: left; }
tbody tr:nth-child(even) { background: #f6f6f6; }
td b { font-weight: 700; }
ul { padding-left: 1.1rem; max-width: 44rem; }
li { margin: .25rem 0; }
figure { margin: .6rem 0 1.4rem; break-inside: avoid; }
figure svg { display: block; width: 100%; height: auto; }
details { margin: .5rem 0; }
summary { cursor: pointer; font-size: .92rem; }
.prompt { white-space: pre-wrap; border-left: 3px solid var(--rule); padding-left: .8rem; font-size: .9rem; }
.prompt .label { display: block; color: var(--soft); font-size: .8rem; }
.tokens { white-space: pre-wrap; max-width: none;
  font: .8rem/1.9 ui-monospace, "SF Mono", Menlo, Consolas, "DejaVu Sans Mono", monospace; }
.legend .tokens { font-size: .74rem; }
.tokens i { font-style: normal; padding: .12em 0; }
.tokens .step { border-left: 1.5px solid var(--ink); }
.tokens .even i { background: var(--even); }
.tokens .odd i { background: var(--odd); }
.tokens i.own { background: none; font-weight: 700; border-bottom: 2px solid var(--ink); }
.tokens i.first { background: #e6e6e6; }
pre { font-size: .72rem; line-height: 1.35; white-space: pre-wrap; overflow-wrap: anywhere; }
@media print {
  html { font-size: 10.5px; } body { margin: 0; max-width: none; } h2, h3 { break-after: avoid; }
  .tokens i { -webkit-print-color-adjust: exact; print-color-adjust: exact; } tr, figure { break-inside: avoid; }
}
"""
WIDE = 12  # columns; tables with more are set smaller


def write_page(content: Content) -> str:
    body = [f"<h1>{escape(content.title)}</h1>", f"<p>{escape(content.lead)}</p>"]
    if content.overview is not None:
        body += ["<h2>All runs</h2>", _table(content.overview)]
    for section in content.sections:
        body += _section(section)
    body += ["<h2>Published, other models</h2>", f"<p>{escape(content.published_note)}</p>", _table(content.published)]
    body.append("<h2>Manifests</h2>")
    for section in content.sections:
        manifest = escape(section.run.manifest_text)
        body.append(f"<details><summary>{escape(section.run.name)}</summary><pre>{manifest}</pre></details>")
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(content.title)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        + "\n".join(body)
        + "\n</body>\n</html>\n"
    )


def _section(section: Section) -> list[str]:
    parts = [f"<h2>{escape(section.heading)}</h2>", f'<p class="soft">{escape(section.setting)}</p>']
    parts += [_table(section.results), f'<p class="soft">{escape(section.reading)}</p>']
    notes = "".join(f"<li>{escape(note)}</li>\n" for note in section.notes)
    parts += ["<h3>Notes</h3>", f"<ul>\n{notes}</ul>"]
    parts += [_figure(figure) for figure in section.figures]
    if section.left_out:
        missing = "; ".join(f"{title} ({reason})" for title, reason in section.left_out)
        parts.append(f'<p class="soft">Left out: {escape(missing)}.</p>')
    if section.answer is not None:
        parts += ["<h3>One answer, block by block</h3>", section.answer]
    else:
        parts.append('<p class="soft">No answer is shown block by block: the run holds no sample.</p>')
    for title, table in section.tables:
        is_long = len(table.rows) > 24
        drawn = _table(table)
        summary = f"<summary>{len(table.rows)} rows</summary>"
        parts += [f"<h3>{escape(title)}</h3>", f"<details>{summary}{drawn}</details>" if is_long else drawn]
    return parts


def _figure(figure: DrawnFigure) -> str:
    svg = figure.svg.replace("<svg", f'<svg role="img" aria-label="{escape(figure.title)}"', 1)
    caption = f"<figcaption>{escape(figure.caption)}</figcaption>"
    return f"<h3>{escape(figure.title)}</h3>\n<figure>\n{svg}\n{caption}\n</figure>"


def _table(table: Table) -> str:
    groups = "".join(
        f'<th class="group" colspan="{width}">{escape(name)}</th>' if name else f'<th colspan="{width}"></th>'
        for name, width in table.groups
    )
    head = f"<tr>{groups}</tr>" if groups else ""
    labels = [cell.is_label for cell in table.rows[0]] if table.rows else []
    head += "<tr>" + "".join(
        f'<th class="label">{escape(heading)}</th>' if is_label else f"<th>{escape(heading)}</th>"
        for heading, is_label in zip(table.headings, labels, strict=False)
    )
    rows = "\n".join(f"<tr>{''.join(_cell(cell) for cell in row)}</tr>" for row in table.rows)
    kind = ' class="wide"' if len(table.headings) > WIDE else ""
    return f'<div class="scroll"><table{kind}>\n<thead>{head}</tr></thead>\n<tbody>\n{rows}\n</tbody></table></div>'


def _cell(cell: Cell) -> str:
    text = f"<b>{escape(cell.text)}</b>" if cell.is_best else escape(cell.text)
    return f'<td class="label">{text}</td>' if cell.is_label else f"<td>{text}</td>"
