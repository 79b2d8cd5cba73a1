"""The report: one HTML file about one or several runs, to be read by people."""

from dpspan.report.rendering import render as render
