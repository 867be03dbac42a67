"""From records to a report: Markdown, figures and one HTML page that works from a file.

    reading.py        the records of a folder
    kinds.py          what each kind of record says: its observations
    observations.py   observations of one setting become a row with an interval
    overall.py        settings that stand for several others
    pictures.py       what is drawn beside rows: heat maps, positions, clusters, token lives
    contents.py       all of it together; what the three writers below show
    markdown.py, figures.py, page.py

Nothing here imports torch or transformers.
"""
