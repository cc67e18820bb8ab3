"""The report: one page about run folders, with its figures and tables as files.

figures/, layout     figures; panels, labels and styles of the groups
sections/            the sections of the page, with their tables
page, page.html      the page
output               its folder
command              `fedmpi report`
"""
