// What the pack adds to the page: its settings, and that saved workflows stay free of the text that nodes show while
// they run. The frontend adds that text as a widget, and would save it among the values of the inputs.
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

// In minutes. nodes/comfy_host.py reads what is chosen, and knows the same choices and defaults.
const MINUTES = (minutes, name) => ({ text: name ?? `${minutes} minutes`, value: minutes });

const SETTINGS = [
  {
    id: "Sharded.Group.ParkAfter",
    category: ["Sharded", "Group", "ParkAfter"],
    name: "Park when idle for",
    tooltip: "Takes models off the GPUs that nobody has used for so long, into host RAM where that has room.",
    type: "combo",
    options: [MINUTES(0, "Never"), MINUTES(5), MINUTES(10), MINUTES(15), MINUTES(60)],
    defaultValue: 10,
    sortOrder: 20,
  },
  {
    id: "Sharded.Group.StopAfter",
    category: ["Sharded", "Group", "StopAfter"],
    name: "Stop when idle for",
    tooltip: "Ends the ranks that nobody has used for so long. The next use starts them and reads the models again.",
    type: "combo",
    options: [MINUTES(0, "Never"), MINUTES(30), MINUTES(60), MINUTES(240)],
    defaultValue: 0,
    sortOrder: 10,
  },
];

app.registerExtension({
  name: "Sharded.NodeText",
  settings: SETTINGS,
  setup() {
    // After the frontend's own listener, which makes the widget.
    api.addEventListener("progress_text", () => setTimeout(keepTextOutOfWorkflows));
  },
});
