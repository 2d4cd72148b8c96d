// Keeps the text that nodes show while they run out of saved workflows: the frontend adds it as a widget, and would
// save it among the values of the inputs.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const TEXT_WIDGET = "$$node-text-preview";

function keepTextOutOfWorkflows() {
  for (const node of app.graph?.nodes ?? []) {
    if (!node.type?.startsWith("Sharded")) continue;
    for (const widget of node.widgets ?? []) {
      if (widget.name === TEXT_WIDGET) widget.serialize = false;
    }
  }
}

app.registerExtension({
  name: "Sharded.NodeText",
  setup() {
    // After the frontend's own listener, which makes the widget.
    api.addEventListener("progress_text", () => setTimeout(keepTextOutOfWorkflows));
  },
});
