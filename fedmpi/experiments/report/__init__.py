"""The report: a page, its pictures and its tables from run folders.

    results, arms        the tables; AVG beside GMA
    departures           in what runs differ from the recipe whose published numbers they are compared with
    figures/, arrange    pictures, and who gets which panel and look
    sections/            the parts of the page
    page, sheet, binder  the page, its style, its folder
    command              what puts these together
"""
