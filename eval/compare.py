"""Several models on the same questions: their scores with intervals, and how each differs from the first.

In: the reports of the models. Out: a Markdown table and its values.
"""

from collections.abc import Mapping

from eval.command import Report
from eval.report import difference_text, interval_text, markdown_table
from eval.statistics import Interval, bootstrap


def compare(reports: Mapping[str, Report]) -> tuple[dict, list[str]]:
    """By the title of a model, each measure in percent with its 95 % interval over pictures, and the paired difference
    to the first, on the questions that both have answered; the same of the model on gray pictures, if it was asked."""
    rows = {}
    for title, report in reports.items():
        rows |= {title: report.scores, **({f"{title}, blind": report.blind} if report.blind else {})}
    pictures = {id_: picture for report in reports.values() for id_, picture in report.pictures.items()}
    first, values, lines = next(iter(rows.values())), {}, []
    measures = dict.fromkeys(measure for scores in rows.values() for measure in scores)
    for name, scores in rows.items():
        values[name], cells = {}, [name]
        for measure in measures:
            if not (by_id := scores.get(measure)):
                cells += [""] * (1 + (len(rows) > 1))
                continue
            mean = percent(by_id, pictures)
            values[name][measure] = mean._asdict() | {"questions": len(by_id)}
            cells.append(interval_text(mean))
            both = {id_: by_id[id_] - before for id_, before in first.get(measure, {}).items() if id_ in by_id}
            if scores is not first and both:
                difference = percent(both, pictures)
                values[name][measure]["difference"] = difference._asdict()
                cells.append(difference_text(difference, difference.significant))
            elif len(rows) > 1:
                cells.append("")
        lines.append(cells)
    if not measures:  # questions without right answers
        return values, []
    head = ["%"]
    for measure in measures:
        head += [measure.replace("_", " "), "difference"] if len(rows) > 1 else [measure.replace("_", " ")]
    asked = {name: {id_ for by_id in scores.values() for id_ in by_id} for name, scores in rows.items()}
    every = set().union(*asked.values())
    fewer = [f"{name} has answered only {len(ids)} of them" for name, ids in asked.items() if len(ids) < len(every)]
    note = "; differences to the first line, * where the interval has no 0" if len(rows) > 1 else ""
    note += "; blind: the same model on gray pictures" if any(report.blind for report in reports.values()) else ""
    note += "".join(f"; {one}" for one in fewer)
    over = "pictures" if len(set(pictures.values())) < len(pictures) else "questions"
    return values, [f"{len(every)} questions, 95 % intervals over {over}{note}", "", *markdown_table(head, lines)]


def percent(scores: Mapping[str, float], pictures: Mapping[str, str]) -> Interval:
    mean = bootstrap(list(scores.values()), [pictures[id_] for id_ in scores])
    return Interval(*(100 * value for value in mean))
