// The page of `oomph plan --html`: its plans are in it, as JSON.

import type { Plans } from "./data";
import { showPlans } from "./plans";

const data = document.getElementById("data");
const page = document.getElementById("page");
if (data && page) showPlans(page, JSON.parse(data.textContent ?? "null") as Plans);
