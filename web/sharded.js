// Registers what the pack adds to ComfyUI's page (declared.json): settings, commands, the tab with the panel, the layout line
// of a Parallel Config. It also keeps saved workflows free of the text that nodes show while they run. The tab's tooltip is
// no key of locales/: frontend 1.32.9 forgets a pack's words when it loads its own in another language than English.
// ComfyUI has browsers ask again for .js and .css files. The others go by new names, or an update would meet old ones.
const file = (name) => fetch(fresh(name)).then((answer) => answer.text());
const fresh = (name) => new URL(`${name}?${Date.now()}`, import.meta.url).href;
const [seam, { words }, view, { Panel }, texts, { version, about, settings, commands }, html] = await Promise.all([
  ...["seam", "strings", "view", "panel"].map((name) => import(fresh(`${name}.mjs`))),
  file("strings.json").then(JSON.parse), file("declared.json").then(JSON.parse), file("panel.html"),
]);
const panel = new Panel(seam, view, (locale) => words(texts, locale), html, version);

// Before the page connects: it complains of events that nobody listens to.
seam.listen("sharded.state", (event) => panel.heard(event));
seam.listen("sharded.incident", (event) => panel.incident(event));
seam.listen("reconnecting", () => panel.fail("offline"));
seam.listen("reconnected", () => panel.wake());
seam.tendNodeText(() => seam.setting("Sharded.Nodes.Text"));

seam.register({
  name: "Sharded",
  settings: settings.map((one) => ({ category: one.id.split("."), ...one })),
  commands: commands.map(({ action, ...one }) => ({ ...one, function: () => panel.command(action) })),
  menuCommands: [{ path: ["Extensions", "Sharded"], commands: commands.map((one) => one.id) }],
  aboutPageBadges: [{ ...about, label: `Sharded ${version}` }],
  setup() {
    seam.addStyle("panel.css");
    const shows = { render: (element) => panel.show(element), destroy: () => panel.hide() };
    seam.addTab({ title: "Sharded", icon: "pi pi-server", tooltip: panel.w.t("tooltip"), ...shows });
  },
  nodeCreated(node) {
    if (node.comfyClass !== "ShardedParallelConfig") return;
    const line = seam.addLine(node, "layout", "sharded-layout");
    const write = async () => {
      const machine = await panel.machine();
      line.title = line.textContent = machine ? view.layoutLine(seam.values(node), seam.linked(node), machine, panel.w) : "";
    };
    seam.watch(node, write);
    write();
  },
});
