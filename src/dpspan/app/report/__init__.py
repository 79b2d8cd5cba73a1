"""The report: one HTML file about one or several runs, to be read by people."""

from dpspan.app.report.rendering import render as render
