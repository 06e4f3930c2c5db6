"use strict";
// What Python does where JavaScript does something else; to_js.py writes calls of these. Tuples and lists are arrays, None is null.
const py = (() => {
  const isRecord = x => x instanceof NamedTuple;
  const isSequence = x => Array.isArray(x) || isRecord(x);
  class Exception extends Error { toString() { return this.message; } }
  class RuntimeError extends Exception {}
  class ValueError extends Exception {}
  class KeyError extends Exception {}
  class TypeError_ extends Exception {}

  class NamedTuple {
    *[Symbol.iterator]() { for (const name of this.constructor._fields) yield this[name]; }
  }

  // A value that tells keys apart as Python's == does. Records never change, so each remembers its own.
  function keyOf(x) {
    if (typeof x === "string" || typeof x === "number") return x;
    if (typeof x === "boolean") return Number(x);
    if (x == null) return null;
    if (Array.isArray(x)) {
      const parts = x.map(keyOf);
      return "\u0001" + parts.map(part => typeof part === "string" ? "'" + part : part).join("\u0002") + "\u0003";
    }
    if (isRecord(x)) {
      if (!keys.has(x)) keys.set(x, keyOf([...x]));
      return keys.get(x);
    }
    if (!keys.has(x)) keys.set(x, `\u0004${++objects}`);
    return keys.get(x);
  }
  const keys = new WeakMap();
  let objects = 0;

  class Dict {                                            // in the order of insertion, like a Map, but any tuple may be a key
    constructor(pairs = [], make = null) {
      this.map = new Map();
      this.make = make;
      for (const [key, value] of pairs) this.set(key, value);
    }
    has(key) { return this.map.has(keyOf(key)); }
    set(key, value) {
      const held = this.map.get(keyOf(key));
      if (held) held[1] = value; else this.map.set(keyOf(key), [key, value]);
      return this;
    }
    at(key) {
      const held = this.map.get(keyOf(key));
      if (held) return held[1];
      if (!this.make) throw new KeyError(repr(key));
      const value = this.make();
      this.set(key, value);
      return value;
    }
    get size() { return this.map.size; }
    *[Symbol.iterator]() { for (const [key] of this.map.values()) yield key; }
  }
  class PySet {
    constructor(values = []) { this.map = new Map(); for (const one of values) this.map.set(keyOf(one), one); }
    has(one) { return this.map.has(keyOf(one)); }
    get size() { return this.map.size; }
    [Symbol.iterator]() { return this.map.values(); }
  }

  // ---------------------------------------------------------------- operators
  const truth = x => typeof x !== "object" || x === null ? Boolean(x) : Array.isArray(x) ? x.length > 0
    : x instanceof Dict || x instanceof PySet ? x.size > 0 : true;
  const and = (a, b) => truth(a) ? b() : a;
  const or = (a, b) => truth(a) ? a : b();
  function eq(a, b) {
    if (a === b) return true;
    if (a == null || b == null) return a == b;
    if (typeof a === "boolean" || typeof b === "boolean") return Number(a) === Number(b);
    if (isSequence(a)) return isSequence(b) && compare(a, b) === 0;
    if (a instanceof Dict) return a.size === b.size && [...a].every(key => b.has(key) && eq(a.at(key), b.at(key)));
    return a instanceof PySet && a.size === b.size && [...a].every(one => b.has(one));
  }
  function compare(a, b) {                                // negative, 0 or positive
    if (typeof a === "number") return a - b;
    if (!isSequence(a)) return eq(a, b) ? 0 : a < b ? -1 : 1;
    const [x, y] = [[...a], [...b]];
    for (let i = 0; i < Math.min(x.length, y.length); i++) if (compare(x[i], y[i])) return compare(x[i], y[i]);
    return x.length - y.length;
  }
  const add = (a, b) => typeof a === "object" && a !== null ? [...a, ...b] : a + b;      // true + 1 is 2 here, too
  function mul(a, b) {
    if (typeof a === "number" && typeof b === "number") return a * b;
    if (isSequence(b) || typeof b === "string") [a, b] = [b, a];
    if (typeof a === "string") return a.repeat(Math.max(0, Number(b)));
    return isSequence(a) ? Array.from({ length: Math.max(0, Number(b)) }, () => [...a]).flat() : a * b;
  }
  const mod = (a, b) => { const left = a % b; return left && (left < 0) !== (b < 0) ? left + b : left; };
  const floordiv = (a, b) => { if (!b) throw new Exception("division by zero"); return Math.round((a - mod(a, b)) / b); };
  const small = (...all) => all.every(x => Math.abs(x) < 2 ** 31);
  const bit_and = (a, b) => small(a, b) ? a & b : Number(BigInt(a) & BigInt(b));
  const bit_or = (a, b) => a instanceof Dict ? new Dict([...items(a), ...items(b)]) : a instanceof PySet ? new PySet([...a, ...b])
    : small(a, b) ? a | b : Number(BigInt(a) | BigInt(b));
  const iadd = (a, b) => { if (!Array.isArray(a)) return add(a, b); a.push(...b); return a; };
  function ior(a, b) {
    if (a instanceof Dict) for (const [key, value] of items(b)) a.set(key, value);
    else if (a instanceof PySet) for (const one of b) a.map.set(keyOf(one), one);
    else return bit_or(a, b);
    return a;
  }
  const isIn = (x, all) => typeof all === "string" ? all.includes(x) : all.has ? all.has(x) : [...all].some(one => eq(one, x));
  function get_item(all, key) {
    if (all instanceof Dict) return all.at(key);
    const values = isRecord(all) ? [...all] : all, found = values[key < 0 ? key + values.length : Number(key)];
    if (found === undefined) throw new Exception(`index ${key} out of range`);
    return found;
  }
  const set_item = (all, key, value) => all instanceof Dict ? all.set(key, value) : all[key < 0 ? key + all.length : key] = value;
  function slice(all, from, to, step) {
    const values = typeof all === "string" ? all : [...all];
    if (step == null || step === 1) return values.slice(from ?? 0, to ?? values.length);
    if (step !== -1 || from != null || to != null) throw new Exception("a slice with such a step is not translated");
    return [...values].reverse();
  }
  function unpack(all, before, after) {                   // a, *b, c = all
    const values = [...all], end = values.length - after;
    return [...values.slice(0, before), values.slice(before, end), ...values.slice(end)];
  }

  // ---------------------------------------------------------------- text
  const repr = x => typeof x === "string" ? `'${x}'` : Array.isArray(x) ? `[${x.map(repr).join(", ")}]` : str(x);
  const str = x => x === true ? "True" : x === false ? "False" : x == null ? "None" : Array.isArray(x) ? repr(x) : x.toString();
  function fixed(x, digits) {                             // like toFixed, but what lies in the middle goes to the even digit
    const text = x.toFixed(digits), more = x.toFixed(Math.min(100, digits + 30)), tail = more.slice(more.indexOf(".") + 1 + digits);
    if (!/^50*$/.test(tail) || (text.at(-1) - 0) % 2 === 0) return text;
    return (Number(text) - 10 ** -digits).toFixed(digits);
  }
  function general(x, digits) {                           // the format g
    if (x === 0 || !isFinite(x)) return String(x);
    const [first, exponent] = x.toExponential(digits - 1).split("e");
    const trimmed = text => text.includes(".") ? text.replace(/\.?0+$/, "") : text;
    if (exponent < -4 || exponent >= digits) return `${trimmed(first)}e${exponent[0]}${exponent.slice(1).padStart(2, "0")}`;
    return trimmed(x.toFixed(digits - 1 - exponent));
  }
  function formatted(x, spec) {
    if (!spec) return str(x);
    const [, fill, align, sign, width, comma, digits, kind] = /^(?:(.)?([<>^]))?([+])?(\d+)?(,)?(?:\.(\d+))?([a-z%])?$/.exec(spec);
    let text = str(x);
    if (typeof x !== "string") {
      const size = Math.abs(Number(x));
      text = kind === "%" ? fixed(size * 100, digits ?? 6) + "%" : kind === "f" ? fixed(size, Number(digits ?? 6))
        : kind === "g" ? general(size, Number(digits ?? 6)) : str(size);
      if (comma) text = text.replace(/^\d+/, whole => whole.replace(/\B(?=(\d{3})+$)/g, ","));
      text = (x < 0 || Object.is(x, -0) ? "-" : sign ?? "") + text;
    }
    const space = Math.max(0, (width ?? 0) - text.length), side = align ?? (typeof x === "string" ? "<" : ">");
    const left = { "<": 0, "^": Math.floor(space / 2), ">": space }[side];
    return (fill ?? " ").repeat(left) + text + (fill ?? " ").repeat(space - left);
  }
  const format = (text, ...values) => text.replace(/\{(?::([^}]*))?\}/g, (_, spec) => formatted(values.shift(), spec ?? ""));
  const quote = text => text && !/[^\w@%+=:,./-]/.test(text) ? text : `'${text.replaceAll("'", `'"'"'`)}'`;

  // ---------------------------------------------------------------- built-in functions
  function each(x) {
    if (x == null || typeof x[Symbol.iterator] !== "function") throw new TypeError_(`${str(x)} is not iterable`);
    return x;
  }
  function next(iterator, ...otherwise) {
    const { value, done } = iterator.next();
    if (!done) return value;
    if (!otherwise.length) throw new Exception("StopIteration");
    return otherwise[0];
  }
  function most(sign) {
    const choose = (all, key, otherwise) => {
      let best, top;
      for (const one of all) {
        const by = key ? key(one) : one;
        if (top === undefined || sign * compare(by, top) > 0) [best, top] = [one, by];
      }
      if (top !== undefined) return best;
      if (otherwise === undefined) throw new ValueError("nothing to choose from");
      return otherwise;
    };
    return [(...all) => choose(all.length > 1 ? all : all[0]), choose];
  }
  const [max, max_with] = most(1), [min, min_with] = most(-1);
  const sum = (all, from = 0) => { let total = from; for (const one of all) total = add(total, one); return total; };
  const sorted_with = (all, key = x => x, reverse = false) =>
    [...all].map(one => [key(one), one]).sort(([a], [b]) => (reverse ? -1 : 1) * compare(a, b)).map(([, one]) => one);
  function range(from, to, step = 1) {
    if (to === undefined) [from, to] = [0, from];
    return Array.from({ length: Math.max(0, Math.ceil((to - from) / step)) }, (_, i) => from + i * step);
  }
  function* enumerate_with(all, from = 0) { for (const one of all) yield [from++, one]; }
  function* zip(...all) {
    const iterators = all.map(one => one[Symbol.iterator]());
    for (;;) {
      const now = iterators.map(one => one.next());
      if (!now.length || now.some(one => one.done)) return;
      yield now.map(one => one.value);
    }
  }
  function* map(f, ...all) { for (const one of zip(...all)) yield f(...one); }
  function* filter(f, all) { for (const one of all) if (truth(f ? f(one) : one)) yield one; }
  function* count(from = 0) { for (;;) yield from++; }
  function round(x, digits = 0) {
    if (digits) return Number(fixed(x, digits));
    const low = Math.floor(x), over = x - low;
    return over < 0.5 || over === 0.5 && low % 2 === 0 ? low : low + 1;
  }
  const pairsOf = x => x instanceof Dict ? items(x) : x?.[Symbol.iterator] ? x : Object.entries(x ?? {});
  const dict = (...parts) => new Dict(parts.flatMap(part => [...pairsOf(part)]));
  dict.fromkeys = (all, value = null) => new Dict([...all].map(key => [key, value]));
  const object = x => Object.fromEntries(items(x));
  const from_json = x => x === null || typeof x !== "object" ? x : Array.isArray(x) ? x.map(from_json)
    : new Dict(Object.entries(x).map(([key, value]) => [key, from_json(value)]));
  const to_json = x => x instanceof Dict ? Object.fromEntries([...items(x)].map(([key, value]) => [key, to_json(value)]))
    : isSequence(x) ? [...x].map(to_json) : x ?? null;
  function call(f, args, keywords) {                      // f(*args, **keywords)
    const names = f._fields ?? f.parameters, given = { ...keywords }, last = names.at(-1)?.startsWith("**");
    for (const name of names.slice(args.length, last ? -1 : undefined)) { args.push(given[name]); delete given[name]; }
    if (last) args.push(dict(given)); else if (Object.keys(given).length) throw new TypeError_(`unexpected ${Object.keys(given)}`);
    return f._fields ? new f(...args) : f(...args);
  }
  function replaced(record, changes) {
    const copy = Object.create(Object.getPrototypeOf(record));
    return Object.assign(copy, record, changes);
  }
  function cached(f) {
    const known = new Map();
    return (...args) => {
      const key = keyOf(args);
      if (!known.has(key)) known.set(key, f(...args));
      return known.get(key);
    };
  }

  function getattr(x, name, otherwise) {
    if (x[name] === undefined && otherwise === undefined) throw new Exception(`no attribute ${name}`);
    return x[name] ?? otherwise ?? null;
  }
  function Counter(all = []) {
    const found = new Dict([], () => 0);
    for (const one of all) found.set(one, found.at(one) + 1);
    return found;
  }
  const gcd = (...all) => all.reduce((a, b) => { while (b) [a, b] = [b, a % b]; return Math.abs(a); }, 0);
  const whole = x => { if (!isFinite(x)) throw new Exception(`${x} is no integer`); return x; };
  const math = {
    inf: Infinity, gcd, log2: Math.log2, log1p: Math.log1p, log: Math.log, exp: Math.exp, sqrt: Math.sqrt, hypot: Math.hypot,
    ceil: x => whole(Math.ceil(x)), floor: x => whole(Math.floor(x)),
    lcm: (...all) => all.reduce((a, b) => a && b ? Math.abs(a * b) / gcd(a, b) : 0, 1),
    prod: all => { let product = 1; for (const x of all) product *= x; return product; },
    comb: (n, k) => { let found = k > n ? 0 : 1; for (let i = 1; i <= k; i++) found = found * (n - k + i) / i; return found; },
  };
  const builtins = {
    abs: Math.abs, bool: truth, all: all => [...all].every(truth),
    any: all => { for (const one of all) if (truth(one)) return true; return false; },
    int: (x = 0) => Math.trunc(Number(x)), float: (x = 0) => Number(x), len: x => x.length ?? x.size ?? [...x].length,
    list: (x = []) => [...x], tuple: (x = []) => [...x], set: x => new PySet(x), deque: (x = []) => [...x],
    reversed: x => [...x].reverse(), defaultdict: make => new Dict([], make), hasattr: (x, name) => x[name] !== undefined,
    iter: x => each(x)[Symbol.iterator](), SimpleNamespace: (...parts) => Object.assign({}, ...parts),
    enumerate: all => enumerate_with(all), sorted: all => sorted_with(all), sum_with: sum, zip_with: zip,
    repr, str, next, max, max_with, min, min_with, sum, sorted_with, range, enumerate_with, zip, map, filter, count, round, dict,
    getattr, Counter, math, shlex: { quote, join: all => [...all].map(quote).join(" ") },
  };

  // ---------------------------------------------------------------- methods of built-in types
  const items = x => x instanceof Dict ? x.map.values() : x.items();
  const methods = {
    items, keys: x => [...x], values: x => [...x.map.values()].map(pair => pair[1]),
    get: (x, key, otherwise = null) => x.has(key) ? x.at(key) : otherwise,
    setdefault: (x, key, value = null) => x.has(key) ? x.at(key) : x.set(key, value).at(key),
    append: (x, one) => { x.push(one); return null; },
    popleft: x => x.shift(),
    pop(x, key = -1) {
      const value = get_item(x, key);
      if (x instanceof Dict) x.map.delete(keyOf(key)); else x.splice(key, 1);
      return value;
    },
    add_to: (x, one) => x.map.set(keyOf(one), one),
    remove(x, one) {
      if (!x.map.delete(keyOf(one))) throw new KeyError(repr(one));
      return null;
    },
    index(x, one) {
      const i = typeof x === "string" ? x.indexOf(one) : [...x].findIndex(other => eq(other, one));
      if (i < 0) throw new ValueError(`${repr(one)} is not in it`);
      return i;
    },
    sort: x => methods.sort_with(x),
    sort_with: (x, key, reverse) => { x.splice(0, x.length, ...sorted_with(x, key, reverse)); return null; },
    join: (text, all) => [...all].join(text), format, lower: x => x.toLowerCase(),
    split: (text, by) => by === undefined ? text.trim().split(/\s+/) : text.split(by),
    partition(text, by) {
      const i = text.indexOf(by);
      return i < 0 ? [text, "", ""] : [text.slice(0, i), by, text.slice(i + by.length)];
    },
    startswith: (text, start) => text.startsWith(start), endswith: (text, end) => text.endsWith(end),
    removeprefix: (text, start) => text.startsWith(start) ? text.slice(start.length) : text,
    isdecimal: text => /^\d+$/.test(text), _asdict: x => dict({ ...x }),
  };
  return {
    Exception, RuntimeError, ValueError, KeyError, TypeError: TypeError_, NamedTuple, Dict, ...builtins, ...methods,
    truth, and, or, eq, add, mul, mod, floordiv, bit_and, bit_or, iadd, ior, in: isIn, get_item, set_item, slice, unpack,
    formatted, each, object, from_json, to_json, call, replaced, cached,
  };
})();
