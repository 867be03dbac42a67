"""From records to pages: all tables, figures and pages that are made from records.

    kinds.py      what each kind of record says: its observations
    rows.py       observations of one setting become a row with an interval
    pictures.py   data for other figures: heat maps, positions, clusters, token lives
    contents.py   all of it together
    body.py       the report in blocks; blocks.py writes them as Markdown and HTML; render.py writes the files
    figures.py    curves; figure_pictures.py, benchmark_figures.py: the other figures; drawn.py: which are drawn again
    docs.py       the pages of docs/: templates/ ask it for numbers and tables; equal_bytes.py, evidence.py, streams.py,
                  bits.py, vllm.py and so on: what is more than a few columns; papers.py: claims and verdicts

Nothing here imports torch or transformers.
"""
