"""Identifies binary files, such as images, archives and executables, by their first bytes."""

from __future__ import annotations

KINDS = {
    b"\x89PNG": "a PNG image",
    b"\xff\xd8\xff": "a JPEG image",
    b"GIF8": "a GIF image",
    b"II*\x00": "a TIFF image",
    b"MM\x00*": "a TIFF image",
    b"%PDF": "a PDF",
    b"PK\x03\x04": "a zip archive, such as .docx or .xlsx",
    b"\xd0\xcf\x11\xe0": "an old Word or Excel file",
    b"BZh": "compressed by bzip2",
    b"\xfd7zXZ": "compressed by xz",
    b"7z\xbc\xaf": "a 7z archive",
    b"\x7fELF": "an executable",
    b"MZ": "an executable",
    b"\x00asm": "an executable",
    b"\xca\xfe\xba\xbe": "a Java class",
    b"SQLite format 3": "a SQLite database",
    b"PAR1": "a Parquet file; name it .parquet",
    b"ARROW1": "an Arrow file; name it .arrow",
    b"\x89HDF": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"\x80\x02": "a pickle",
    b"\x80\x03": "a pickle",
    b"\x80\x04": "a pickle",
    b"\x80\x05": "a pickle",
    b"RIFF": "an audio, image or video file",
    b"ID3": "an audio file",
    b"OggS": "an audio or video file",
    b"wOF": "a font file",
}
LONGEST = max(map(len, KINDS))


def kind_of(content: bytes) -> str:
    """Returns a description of a binary file's type, or "" if the type is unknown."""
    if content[4:8] == b"ftyp":
        return "a video file"
    return next((kind for magic, kind in KINDS.items() if content.startswith(magic)), "")
