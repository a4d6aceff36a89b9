// The page of `oomph explain --html`: the explanation and its picture are in it, as JSON.

import { type Explained, showExplanation } from "./explanation";

const data = document.getElementById("data");
const page = document.getElementById("page");
if (data && page) showExplanation(page, JSON.parse(data.textContent ?? "null") as Explained);
