"""A text of ordinary prose, at hand before the first request comes: it chooses the bits of all rows (`bits=auto`)."""

SAMPLE_TEXT = """\
The ferry to the island leaves at seven in the morning, and in winter there is no other until the late afternoon. Most \
of the people on board know each other. A teacher corrects the last of her exercise books, two carpenters sleep with \
their caps over their eyes, and a boy of nine, who travels alone to the dentist, counts the buoys and writes their \
numbers on the back of his hand. When the wind comes from the north the crossing takes fifty minutes instead of \
thirty-five, and the captain says over the loudspeaker that coffee costs nothing today.

The harbour on the other side was built in 1887 for the slate that was quarried there. At its best the quarry employed \
four hundred men, and its stones cover the roofs of half the capital. It closed in 1931. Since then the pits have \
filled with rain, clear and very cold, and in August young people jump into them from ledges that their \
great-grandparents cut. The old engine house is now a library with 12,000 books, a stove and one computer. Anyone may \
borrow three books at a time; whoever returns them late pays nothing, but has to carry in wood for the stove.

How does a place with 640 inhabitants keep its school open? "We asked ourselves what we would miss first," says the \
mayor, "and then we paid for that first." The village sells the power of two wind turbines, about 9 million \
kilowatt-hours a year, and half of the income goes to the school. The other half repairs the road along the cliffs, \
which the sea takes back a little every spring. If the price of electricity falls below four cents, the plan no longer \
works; so far it has happened only once, for eleven days.
"""
