// What the panel says about a state: pure functions from the data of /sharded/state and words (strings.mjs) to plain data.
// Unknown is null in that data and stays unknown here, never zero.
const LATE_SECONDS = 5; // a rank or a card tells its memory every second or two
const IDLE = ["ready", "parked"];
const STAGES = { stopped: "none", broken: "failed", ready: "idle", answering: "working" };
const RUNNING = ["starting", "loading", "restoring", "encoding", "sampling", "warming", "decoding", "verifying", "parking",
  "unloading", "measuring", "working", "cancelling", "stalled", "stopping"];
const FAILURES = ["died", "silent", "stuck", "memory", "failed", "start"];

const known = (value) => value !== null && value !== undefined;
const total = (list, name) => list.reduce((sum, one) => sum + (one[name] ?? 0), 0);

/** "GPU 1 RTX 3090" of "GPU 1 NVIDIA GeForce RTX 3090", and "GPU 1" of it. */
const shortLabel = (label) => label.replace(/NVIDIA (GeForce )?/, "");
const place = (label) => /^[GC]PU \d+/.exec(label)?.[0] ?? label;
/** "flux2-dev" of the slot "flux2-dev.safetensors-0123abcd". */
const modelName = (slot) => slot.replace(/-[0-9a-f]{8}$/, "").replace(/\.safetensors$/, "");
const atWork = (group, w) => modelName(group.slot ?? "") || w.t("model");

/** "GPU 0, 1, 3" of such labels. */
function where(labels, w) {
  const numbers = labels.map((label) => /^GPU (\d+)/.exec(label)?.[1]);
  return numbers.length && numbers.every(known) ? `GPU ${numbers.join(", ")}` : w.t("cpu");
}

/** The newest problem of a group that no later run has made history: the ranks outlive some. */
function failureOf(group, state) {
  const found = state.incidents.find((one) => one.group === group.id && FAILURES.includes(one.kind));
  const newest = IDLE.includes(group.stage) && found?.time >= state.time - (group.idle ?? 0) - 1;
  return group.stage === "broken" || newest ? found : undefined;
}

function phaseOf(group, state) {
  if (group.stopping && group.state !== "stopped") return "stopping";
  if (group.stalled) return "stalled";
  if (failureOf(group, state)) return "failed";
  if (group.cancelling) return "cancelling";
  const phase = group.warming ? "warming" : STAGES[group.stage] ?? group.stage;
  return [...RUNNING, "none", "idle", "parked", "failed"].includes(phase) ? phase : "working";
}

const left = (group, w) => known(group.progress?.left) && w.t("left", { time: w.span(group.progress.left) });
const ranksOn = (group, w) => w.t("ranks_on", { n: group.ranks.length, where: where(group.ranks.map((one) => one.label), w) });

// The line of a phase and the one under it; a phase that is not here is its name alone.
const SAY = {
  none: (_, w) => [w.t("none"), w.t("none_more")],
  starting: ({ progress: now, ranks, start_seconds: seconds }, w) => [ // an event tells of no ranks
    w.t(now || ranks.length ? "starting" : "starting_live", { n: now?.total ?? ranks.length, done: now?.done ?? 0 }),
    known(seconds) && w.t("starting_more", { time: w.span(seconds) })],
  loading(group, w) {
    const { done, total: all, per_second: rate } = group.progress ?? {}, slot = atWork(group, w);
    if (!all) return [w.t("loading", { slot })];
    return [w.t("loading_part", { slot, percent: w.percent(done / all) }), w.also(rate && `${w.size(rate)}/s`, left(group, w))];
  },
  sampling(group, w) {
    const { done: step, total: all } = group.progress ?? {};
    const pace = known(group.step_seconds) && w.t("per_step", { time: w.time(group.step_seconds) });
    return [w.t(!step ? "sampling" : all ? "sampling_part" : "sampling_count", { step, total: all }), w.also(pace, left(group, w))];
  },
  warming: (_, w) => [w.t("warming"), w.t("warming_more")],
  idle(group, w) {
    if (group.parked_by === "comfyui" && !group.slots.length) return [w.t("parked_comfyui"), w.t("parked_more")];
    const time = known(group.idle) ? `; ${w.t("idle_for", { time: w.span(group.idle) })}` : "";
    return [w.t("idle"), ranksOn(group, w) + time];
  },
  parked({ slots, ranks, parked_by: who }, w) {
    const seconds = total(slots, "restore_seconds"), back = seconds ? "parked_time" : "parked_more";
    const more = w.t(who === "idle" ? "parked_idle" : back, { time: w.span(seconds) });
    const line = ranks.some((one) => one.label.startsWith("GPU")) ? "parked" : "parked_cpu";
    return [w.t(line, { size: w.size(total(slots, "total_bytes")) }), more];
  },
  stalled({ stalled: { rank, kind, seconds, limit, doing, done } }, w) {
    const sign = w.also(RUNNING.includes(doing) && w.t(doing, { slot: "" }).trim(), done && w.t("step", { step: done }));
    const line = w.t(kind === "stuck" ? "stuck" : "stalled", { rank, time: w.span(seconds), limit: w.span(limit) });
    return [line, sign && w.t("last_sign", { sign })];
  },
  cancelling: ({ progress: now }, w) => [
    w.t(now?.unit === "steps" && now.done ? "cancelling_step" : "cancelling", { step: now?.done }), w.t("cancelling_more")],
  failed: (group, w, failure) => [w.t("stopped", { what: whatFailed(failure, w) }),
    group.stage === "broken" ? w.t("failed_more") : ranksOn(group, w)],
};

function whatFailed(incident, w) {
  if (incident?.kind !== "start" && !known(incident?.rank)) return w.t("what_group");
  const device = incident.device ? ` (${place(incident.device)})` : "", step = incident.params?.step;
  return w.t(`what_${incident.kind}`, { rank: `rank ${incident.rank}${device}`, at: step ? w.t("at_step", { step }) : "" });
}

/** What a screen reader says when a phase begins: no figures, or it would never be silent; nothing before the cause is known. */
function spoken(group, phase, line, failure, w) {
  if (phase === "failed" && !failure) return "";
  if (["starting", "parked", "stalled"].includes(phase)) return w.t(`${phase}_live`, { rank: group.stalled?.rank });
  return ["loading", "sampling", "cancelling"].includes(phase) ? w.t(phase, { slot: atWork(group, w) }) : line;
}

/** One group as its card shows it. `part` of its progress is 0 to 1, or null; a block of cells is a replica. */
export function card(group, state, w) {
  const phase = phaseOf(group, state), failure = phase === "failed" ? failureOf(group, state) : undefined;
  const [line, more] = SAY[phase]?.(group, w, failure) ?? [w.t(phase)];
  const { done, total: all } = group.progress ?? {}, { tensor = 1, ulysses = 1, ring = 1 } = group.degrees ?? {};
  return {
    phase, line, more: more || "", failure, buttons: buttons(group, phase, w), spoken: spoken(group, phase, line, failure, w),
    part: RUNNING.includes(phase) && all > 0 ? Math.min(1, done / all) : null, columns: tensor, block: tensor * ulysses * ring,
    cells: phase === "none" ? [] : group.ranks.map(({ rank, label, state: rankState }) => {
      const gone = rankState === "dead" || (group.stage === "broken" && rank === failure?.rank);
      return { gone, text: w.t(gone ? "rank_stopped" : "rank_on", { rank, device: place(label) }) };
    }),
  };
}

/** For each button "" (may be pressed), or why not now; one that is not there has no place in this phase. */
function buttons(group, phase, w) {
  if (phase === "none") return { examples: "" };
  if (group.stage === "broken") return {};
  const holds = (state) => group.slots.some((slot) => slot.state === state);
  const stop = phase === "cancelling" || phase === "stopping" ? w.t(phase) : "";
  if (group.stage === "parked") return { restore: holds("parked") ? "" : w.t("nothing_parked"), stop };
  return { park: RUNNING.includes(phase) ? w.t("busy") : holds("loaded") ? "" : w.t("nothing_loaded"), stop };
}

/** Whether a stop ends a run, and how many seconds the models took to load, 0 if that is not known. */
export const stopCosts = ({ stage, slots }) => ({ running: !IDLE.includes(stage), seconds: total(slots, "load_seconds") });

/** One device: its name, how full it is, the parts in percent of it, the same in words, and who else is on it. */
export function memoryRow(device, groups, w) {
  const { total: all, used, weights, work } = device, rank = groups.find((one) => one.id === device.group)?.ranks[device.rank];
  const others = [used, weights, work].every(known) ? Math.max(0, used - weights - work) : null;
  const parts = Object.entries({ weights, work, others }), age = Math.max(device.age ?? 0, rank?.memory_age ?? 0);
  const full = all ? w.t("used_of", { used: w.gigabytes(used), total: w.gigabytes(all) }) : w.size(used);
  const holders = device.others.map((one) => w.also(one.name || w.t("unnamed"), known(one.bytes) && w.size(one.bytes)));
  const name = shortLabel(device.label);
  return {
    name: device.display ? w.t("display", { name }) : name,
    text: !known(used) ? w.t("unknown") : age >= LATE_SECONDS ? w.t("old", { text: full, time: w.span(age) }) : full,
    shares: parts.map(([, bytes]) => (all && bytes ? (100 * bytes) / all : 0)),
    label: parts.map(([part, bytes]) => `${w.t(part)}: ${known(bytes) ? w.size(bytes) : w.t("unknown")}`).join(", "),
    holders: holders.length ? `${w.t("others")}: ${holders.join("; ")}` : "",
  };
}

export const slotLine = ({ name, state, total_bytes: bytes }, w) =>
  w.t(state === "loaded" ? "loaded" : "in_ram", { name: modelName(name), size: w.size(bytes) });

/** The parts of the last run, the fullest GPU, the seconds of its steps, and their median in words; "" is unknown. */
export function lastRun(run, w) {
  const steps = run?.step_seconds ?? [], middle = [...steps].sort((a, b) => a - b)[steps.length >> 1];
  const sampled = run?.unit === "calls" ? "run_calls" : "run_steps";
  const parts = [["load", "run_load"], ["encode", "run_encode"], ["sampling", sampled], ["decode", "run_decode"]]
    .filter(([name]) => known(run?.[name])).map(([name, key]) => w.t(key, { n: run.steps ?? "", time: w.time(run[name], 1) }));
  return {
    last: w.also(...parts) || (steps.length ? "" : w.t("no_run")), steps, median: middle ? w.t("median", { time: w.time(middle) }) : "",
    peak: known(run?.peak) ? w.t("run_peak", { size: w.size(run.peak) }) : "",
  };
}

/** What the machine itself limits; "" for two GPUs and more. */
export const note = (devices, w) => [w.t("no_gpu"), w.t("one_gpu")][devices.filter((one) => one.kind === "cuda").length] ?? "";

/** The message for an incident. The server's words are English; other languages say it by its kind. */
export function toastOf(incident, w) {
  const { kind, rank, params } = incident, failed = FAILURES.includes(kind);
  const [severity, seconds] = failed ? ["error", 15] : { layout: ["warning", 10], restarted: ["info", 6] }[kind] ?? ["error", 10];
  let { title, text } = incident;
  if (w.language !== "en" && (failed || ["layout", "restarted", "action"].includes(kind))) {
    const say = (key) => w.t(`toast_${key}`, { rank, ...params });
    title = say(failed ? (known(rank) ? "rank" : "group") : kind);
    text = failed ? whatFailed(incident, w) : kind === "action" ? text : say(`${kind}_text`);
  }
  return { failed, severity, seconds, title, text: failed ? `${text} ${w.t("toast_see")}` : text };
}

/** The state as text for a bug report: no home directory, no serial number, nothing of a prompt. */
export function diagnostics(state, page, browser) {
  const versions = `ComfyUI-Sharded ${state?.version ?? "?"} (page ${page}), ComfyUI ${state?.comfyui ?? "?"}, ${browser}`;
  return `${versions}\n${JSON.stringify(state, null, 1)}`
    .replace(/\/(home|Users)\/[^/\s"':]+|\/root(?=[/\s"':])/g, "~").replace(/(GPU-[0-9a-f]{4})[0-9a-f-]{20,}/g, "$1");
}

// ---- the layout line of a Parallel Config

const AXES = ["tensor", "ulysses", "ring", "stage", "replica"];
const layoutName = (degrees, w) =>
  AXES.filter((axis) => degrees[axis] > 1).map((axis) => `${axis} ${degrees[axis]}`).join(" x ") || w.t("line_one");

/** What the values of a Parallel Config mean on this machine; `linked` are inputs that another node sets. */
export function layoutLine(values, linked, machine, w) {
  const used = ["strategy", "devices", ...(values.strategy === "manual" ? AXES : [])].filter((one) => linked.includes(one));
  if (used.length) return w.t("line_linked", { names: used.join(", ") });
  const { labels = [], auto, wrong } = chosen(String(values.devices), machine, w), here = labels.length;
  const on = (n) => where(labels.slice(0, n), w);
  if (wrong || values.strategy !== "manual") return wrong ?? w.t("line_adapts", { ...values, n: auto, where: on(auto) });
  const degrees = Object.fromEntries(AXES.map((axis) => [axis, Number(values[axis])]));
  if (degrees.stage > 1) return w.t("line_stage");
  const ranks = Object.values(degrees).reduce((product, one) => product * one, 1);
  if (ranks <= here) return w.t("line_manual", { layout: layoutName(degrees, w), where: on(ranks) });
  return w.t(here > 1 ? "line_short" : "line_single", { ranks, here, layout: layoutName(smaller(degrees, here), w) });
}

/** The labels of the devices that "auto", "cpu" or "0,1,3" stands for, as the server reads it; or what is wrong with it. */
function chosen(text, machine, w) {
  const wanted = text.trim().toLowerCase() || "auto";
  const cards = machine.devices.filter((one) => one.kind === "cuda").map((one) => place(one.label));
  if (wanted === "auto" && cards.length) return { labels: cards, auto: cards.length };
  if (["auto", "cpu"].includes(wanted)) {
    return { labels: Array(machine.cpu_ranks).fill("CPU"), auto: cards.length ? 2 : machine.auto_ranks };
  }
  const numbers = wanted.split(",").map((one) => one.trim()), labels = numbers.map((one) => `GPU ${Number(one)}`);
  if (!numbers.every((one) => /^\d{1,9}$/.test(one))) return { wrong: w.t("line_unread") };
  const missing = numbers.filter((_, at) => !cards.includes(labels[at])).join(", ");
  return missing ? { wrong: w.t("line_missing", { numbers: missing }) } : { labels, auto: labels.length };
}

/** The nearest degrees for so many devices: each as far as there is room, weights first. */
function smaller(degrees, room) {
  return Object.fromEntries(AXES.map((axis) => {
    let fits = Math.min(degrees[axis], room);
    while (degrees[axis] % fits) fits -= 1;
    room = Math.floor(room / fits);
    return [axis, fits];
  }));
}
