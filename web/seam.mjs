// The only module that touches ComfyUI's app and api, so that what differs between its frontends ends here.
// Read in the sources of 1.32.9 to 1.58.1; everybody else gets plain functions.
import { app } from "../../scripts/app.js";
import { api } from "../../scripts/api.js";

const TAB = "sharded", TEXT_WIDGET = "$$node-text-preview";
const manager = () => app.extensionManager;

export const register = (extension) => app.registerExtension(extension);
export const listen = (type, heard) => api.addEventListener(type, (event) => heard(event.detail ?? {}));
export const request = (path, options) => api.fetchApi(path, options);
export const setting = (id) => manager().setting.get(id);
export const locale = () => setting("Comfy.Locale") ?? navigator.language.split("-")[0];
export const showExamples = () => manager().command.execute("Comfy.BrowseTemplates");
export const confirm = (title, message) => manager().dialog.confirm({ title, message, type: "default" });
export const reload = () => window.location.reload();
export const fileUrl = (name) => new URL(name, import.meta.url).href;
/** Sanitised HTML, undefined where the frontend renders none (1.42.7 and older). */
export const markdown = (text, base) => manager().renderMarkdownToHtml?.(text, base);

const element = (tag, values) => Object.assign(document.createElement(tag), values);
export const addStyle = (name) => document.head.append(element("link", { rel: "stylesheet", href: fileUrl(name) }));

/** `severity` is error, warning or info. PrimeVue's toast, until 1.55.18, has no function for each. */
export function toast({ severity, title, text, seconds, id }) {
  const { toast: toasts } = manager(), life = 1000 * seconds;
  if (toasts[severity]) toasts[severity](title, { id, description: text, duration: life });
  else toasts.add({ severity: severity === "warning" ? "warn" : severity, summary: title, detail: text, life });
}

// ---- the tab

export const addTab = (tab) => manager().registerSidebarTab({ id: TAB, type: "custom", ...tab });
/** Also true where the frontend does not tell which tab is open. */
export const tabIsOpen = () => [undefined, TAB].includes(manager().sidebarTab?.activeSidebarTabId);
export const openTab = () => tabIsOpen() || manager().command.execute(`Workspace.ToggleSidebarTab.${TAB}`);

/** Through the store: a change of the object that was registered is not seen. */
export function badge(text) {
  const tab = manager().getSidebarTabs().find((one) => one.id === TAB);
  if (tab && (tab.iconBadge ?? "") !== text) tab.iconBadge = text;
}

export async function copy(text) {
  try {
    await navigator.clipboard.writeText(text);
  } catch { // there is none over plain HTTP from another machine
    const focused = document.activeElement, box = element("textarea", { value: text });
    document.body.append(box);
    box.select();
    document.execCommand("copy");
    box.remove();
    focused?.focus();
  }
}

// ---- nodes

function* allNodes() {
  const root = app.rootGraph ?? app.graph;
  yield* root?.nodes ?? [];
  for (const inner of root?.subgraphs?.values() ?? []) yield* inner.nodes;
}

/** Keep the status text of the pack's nodes out of saved workflows (1.32.9 puts it among the values of the inputs), and take
 *  it off while `wanted` says no. After the frontend's own listener, which makes the widget. */
export function tendNodeText(wanted) {
  api.addEventListener("progress_text", () => setTimeout(() => {
    for (const node of allNodes()) {
      const widget = node.type?.startsWith("Sharded") && node.widgets?.find((one) => one.name === TEXT_WIDGET);
      if (widget && wanted()) widget.serialize = false;
      else if (widget) node.removeWidget(widget);
    }
  }));
}

/** Add a line of text under a node's values, which is saved nowhere; the element to write it into. */
export function addLine(node, name, type) {
  const line = element("div", { className: type }), height = () => 40;
  // Two switches: this one keeps it out of the prompt, the other out of the saved workflow.
  const options = { serialize: false, getValue: () => "", setValue() {}, getMinHeight: height, getMaxHeight: height, margin: 4 };
  node.addDOMWidget(name, type, line, options).serialize = false;
  line.dataset.testid = `sharded-node-${name}`;
  return line;
}

/** Call `changed` after each change of a value or link of a node, whoever makes it. */
export function watch(node, changed) {
  const hooks = [...node.widgets.map((one) => [one, "callback"]), [node, "onConfigure"], [node, "onConnectionsChange"]];
  for (const [object, name] of hooks) {
    const before = object[name];
    object[name] = function (...given) {
      queueMicrotask(changed);
      return before?.apply(this, given);
    };
  }
}

export const values = (node) => Object.fromEntries(node.widgets.map((one) => [one.name, one.value]));
export const linked = (node) => (node.inputs ?? []).filter((one) => one.widget && one.link != null).map((one) => one.name);
