"""The report: one page about run folders, with its figures and tables as files.

    results, pairs       the tables; plain against masked averaging
    departures           how runs differ from the recipe of published numbers
    figures/, layout     figures; panels, labels and styles of the groups
    sections/            the parts of the page
    page, page.html      the page
    output               its folder
    command              `fedmpi report`
"""
