// The panel's words in the page's language, from strings.json (English, Chinese and Japanese, key by key), and numbers
// in the form of that language. A key that ends in _1 is the form for one. Names of axes are the same in every language.
export const LANGUAGES = ["en", "zh", "ja"];

/** English for a language that the pack does not speak. */
export function words(texts, locale) {
  const column = Math.max(0, LANGUAGES.indexOf(locale)), language = LANGUAGES[column];
  const formats = [0, 1, 2].map((digits) =>
    new Intl.NumberFormat(language, { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  const number = (value, digits = 0) => formats[digits].format(value);
  const t = (key, values = {}) => ((values.n === 1 && texts[`${key}_1`]) || texts[key])[column]
    .replace(/\{(\w+)\}/g, (_, name) => values[name] ?? "");
  return {
    language, t,
    /** Why the server refuses: its sentence, in other languages what its code means. */
    refusal: ({ error, code, device }) => (column && texts[code] ? t(code, { device }) : error),
    size: (bytes) => (bytes < 2 ** 30 ? `${number(bytes / 2 ** 20)} MB` : `${number(bytes / 2 ** 30, 1)} GB`),
    gigabytes: (bytes) => number(bytes / 2 ** 30, 1),
    time: (seconds, digits = seconds < 10 ? 2 : 1) => t("seconds", { v: number(seconds, digits) }),
    span: (seconds) => (seconds < 90 ? t("seconds", { v: number(seconds) })
      : seconds < 5400 ? t("minutes", { v: number(seconds / 60) }) : t("hours", { v: number(seconds / 3600) })),
    also: (...parts) => parts.filter(Boolean).join(t("comma")),
    percent: (part) => number(Math.floor(100 * part)),
    clock: (milliseconds) => new Date(milliseconds).toLocaleTimeString(language === "en" ? "en-GB" : language),
  };
}
