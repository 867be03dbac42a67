"""From records to pages: all tables, figures and pages that are made from records.

    kinds.py      what each kind of record says: its observations
    rows.py       observations of one setting become a row with an interval
    pictures.py   data for other figures: heat maps, positions, clusters
    contents.py   all of it together
    body.py       the report in blocks; blocks.py writes them as Markdown and HTML; render.py writes the files
    figures.py    curves; figure_pictures.py, benchmark_figures.py, evidence_picture.py: the other figures;
                  drawn.py: which are drawn again
    canvas.py     what figures share; palette.py: colours and markers of methods
    docs.py       the pages of docs/: templates/ ask it for numbers and tables. What is more than a few columns:
                  agents.py, benchmarks.py, bfcl.py, bits.py, doubt.py, equal_bytes.py, evidence.py, facts.py,
                  long_answers.py, ranking.py, recall.py, streams.py, vllm.py, vllm_answers.py
    outside.py    records that others made
    papers.py     claims and verdicts; recommend.py: the table behind `kvsketch recommend`

Nothing here imports torch or transformers.
"""
