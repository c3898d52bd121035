"""Reports as web pages: self-contained HTML that needs no network, made from the JSON that the commands write."""

from onnx_sparseconv.report.data import FolderReport, Report
from onnx_sparseconv.report.page import folder_page, report_page
from onnx_sparseconv.report.read import read_folder, read_report

__all__ = ["FolderReport", "Report", "folder_page", "read_folder", "read_report", "report_page"]
