"""A table as an .xlsx file for evaluation servers: one sheet, texts and whole numbers (ECMA-376, required parts)."""

import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from xml.sax.saxutils import escape

from model.common import atomic_path

_TYPES = "application/vnd.openxmlformats-officedocument.spreadsheetml"
_PACKAGE = "http://schemas.openxmlformats.org/package/2006"
_OFFICE = "http://schemas.openxmlformats.org/officeDocument/2006/relationships"
_SHEET = "http://schemas.openxmlformats.org/spreadsheetml/2006/main"
_LINKS = f'<Relationships xmlns="{_PACKAGE}/relationships"><Relationship Id="r1" Type="{_OFFICE}/%s" Target="%s"/>'
_PARTS = {
    "[Content_Types].xml": f'<Types xmlns="{_PACKAGE}/content-types">'
    '<Default Extension="rels" ContentType="application/vnd.openxmlformats-package.relationships+xml"/>'
    f'<Override PartName="/xl/workbook.xml" ContentType="{_TYPES}.sheet.main+xml"/>'
    f'<Override PartName="/xl/sheet.xml" ContentType="{_TYPES}.worksheet+xml"/></Types>',
    "_rels/.rels": _LINKS % ("officeDocument", "xl/workbook.xml") + "</Relationships>",
    "xl/_rels/workbook.xml.rels": _LINKS % ("worksheet", "sheet.xml") + "</Relationships>",
    "xl/workbook.xml": f'<workbook xmlns="{_SHEET}" xmlns:r="{_OFFICE}">'
    '<sheets><sheet name="Sheet1" sheetId="1" r:id="r1"/></sheets></workbook>',
}


def write_xlsx(path: Path, rows: Iterable[Iterable[str | int]]) -> None:
    """Write the rows, the first of which names the columns. Characters that XML cannot hold are left out."""

    def cell(value: str | int) -> str:
        if isinstance(value, int):
            return f"<c><v>{value}</v></c>"
        text = re.sub("[\0-\x08\x0b\x0c\x0e-\x1f\ud800-\udfff\ufffe\uffff]", "", value)
        return f'<c t="inlineStr"><is><t xml:space="preserve">{escape(text)}</t></is></c>'

    body = "".join(f"<row>{''.join(map(cell, row))}</row>" for row in rows)
    parts = _PARTS | {"xl/sheet.xml": f'<worksheet xmlns="{_SHEET}"><sheetData>{body}</sheetData></worksheet>'}
    with atomic_path(path) as temporary, zipfile.ZipFile(temporary, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, content in parts.items():
            archive.writestr(name, f'<?xml version="1.0" encoding="UTF-8" standalone="yes"?>\n{content}')
