// The page of `oomph report --html`: the report and its series are in it, as JSON.

import type { ReportPage } from "./report_data";
import { showReport } from "./reports";

const data = document.getElementById("data");
const page = document.getElementById("page");
if (data && page) showReport(page, JSON.parse(data.textContent ?? "null") as ReportPage);
