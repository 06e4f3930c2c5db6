"""Translate Python modules to JavaScript, so that a page computes with the same formulas as the command line.

    python tools/plan/to_js.py step08_5d/schedules.py > schedules.js

It takes the part of Python that such modules use: functions, generators, lambdas, comprehensions, NamedTuples and other small
classes, exceptions, f-strings. It refuses whatever else it meets. Operators whose meaning depends on the type become calls of
python.js, which does at run time what Python does. Two differences remain: 2.0 is 2, so str(2.0) is "2"; and integers are exact
only up to 2**53.
"""
import ast
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESERVED = set("await case catch const debugger default delete do enum eval export extends false function implements in instanceof "
               "interface let new null package private protected public static super switch this throw true typeof var void "
               "arguments py".split())
BUILTINS = set("abs all any bool defaultdict deque dict divmod enumerate filter float getattr hasattr int iter len list map max min "
               "next print range reversed round set sorted str sum tuple zip Counter SimpleNamespace count".split())
EXCEPTIONS = {"Exception", "RuntimeError", "ValueError", "KeyError", "TypeError"}
LIBRARIES = {"math", "shlex"}                             # python.js has those of their functions that we use
METHODS = set("append add remove discard extend index pop popleft sort items keys values get setdefault update copy union join split "
              "partition startswith endswith removeprefix removesuffix replace lower upper strip format isdecimal _asdict".split())
ARITHMETIC = {ast.Sub: "-", ast.Div: "/", ast.Pow: "**"}
DYNAMIC = {ast.Add: "add", ast.Mult: "mul", ast.Mod: "mod", ast.FloorDiv: "floordiv", ast.BitAnd: "bit_and", ast.BitOr: "bit_or",
           ast.Sub: "sub"}
ORDER = {ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
TRUE_OR_FALSE = ast.Compare, ast.Not                      # what is a JavaScript boolean already
BY_KEYWORD = dict(max=("key", "default"), min=("key", "default"), sorted=("key", "reverse"), sort=("key", "reverse"),
                  enumerate=("start",), sum=("start",), zip=("strict",))


class Untranslated(Exception):
    """The module has something that this translator does not know."""


def parse(path):
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def names_of(statement):
    """Return the names that a statement at the top of a module defines."""
    if isinstance(statement, (ast.FunctionDef, ast.ClassDef)):
        return [statement.name]
    targets = statement.targets if isinstance(statement, ast.Assign) else [getattr(statement, "target", None)]
    return [node.id for target in targets if target for node in ast.walk(target) if isinstance(node, ast.Name)]


class Module:
    """A module: its statements by the names that they define, and what its other names mean."""
    def __init__(self, name, tree, modules):
        self.name, self.statements, self.imported = name, {}, {}          # imported: name -> (module, name there or None)
        for statement in tree.body:
            if isinstance(statement, ast.Import):
                for alias in statement.names:
                    self.imported[alias.asname or alias.name] = (alias.name, None)
            elif isinstance(statement, ast.ImportFrom):
                for alias in statement.names:
                    place = statement.module.split(".")[-1], alias.name
                    self.imported[alias.asname or alias.name] = (alias.name, None) if alias.name in modules else place
            else:
                self.statements.update(dict.fromkeys(names_of(statement), statement))


def find(modules, module, node):
    """Return the (module, name) that defines what a Name or an Attribute of a module means; None if it is something else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        of, name = modules[module].imported.get(node.value.id, (None, "")), node.attr
        return find(modules, of[0], ast.Name(name)) if of[1] is None and of[0] in modules else None
    if not isinstance(node, ast.Name):
        return None
    if node.id in modules[module].statements:
        return module, node.id
    there, name = modules[module].imported.get(node.id, (None, None))
    return find(modules, there, ast.Name(name)) if there in modules and name else None


def reachable(modules, wanted):
    """Return the (module, name) pairs that are needed to compute those that are wanted."""
    found, to_see = set(), list(wanted)
    while to_see:
        place = to_see.pop()
        if place in found:
            continue
        found.add(place)
        module, name = place
        if name not in modules[module].statements:
            raise Untranslated(f"{module} does not define {name}")
        statement = modules[module].statements[name]
        to_see += [(module, other) for other in names_of(statement)]
        to_see += filter(None, (find(modules, module, node) for node in without_hints(statement)))
    return found


def without_hints(node):
    """Yield a node and all nodes in it, but for type hints."""
    yield node
    for field, child in ast.iter_fields(node):
        if field not in ("annotation", "returns"):
            for one in child if isinstance(child, list) else [child]:
                if isinstance(one, ast.AST):
                    yield from without_hints(one)


def translate(trees, wanted=None):
    """Return JavaScript that defines one object for each module of {name: tree}, which must be in the order of their imports.

    With wanted, a list of "module.name", leave out what those do not need. python.js has to come first.
    """
    modules = {}
    for name, tree in trees.items():
        modules[name] = Module(name, tree, trees)
    needed = {(name, one) for name, module in modules.items() for one in module.statements} if wanted is None else reachable(
        modules, [tuple(one.split(".")) for one in wanted])
    # functions that are called with ** must know the names of their parameters when the page runs
    by_name = {getattr(call.func, "id", getattr(call.func, "attr", "")) for tree in trees.values() for call in ast.walk(tree)
               if isinstance(call, ast.Call) and any(keyword.arg is None for keyword in call.keywords)}
    parts = []
    for name, module in modules.items():
        mine = [statement for one, statement in module.statements.items() if (name, one) in needed]
        if mine:
            writer = Writer(modules, name, by_name)
            lines = [line for statement in dict.fromkeys(mine) for line in writer.statement(statement)]
            defined = [writer.safe(one) for one in module.statements if (name, one) in needed]
            parts.append(f"const {name} = (() => {{\n" + "\n".join(indented(lines)) + f"\n  return {{{', '.join(defined)}}};\n}})();\n")
    return "\n".join(parts)


def indented(lines):
    return ["  " + line for line in lines]


def quoted(text):
    return json.dumps(text)


class Writer:
    """Write the statements and expressions of one module. Methods with a node's name translate that node."""
    def __init__(self, modules, module, by_name):
        self.modules, self.module, self.by_name = modules, module, by_name
        self.scopes = []                                  # of the functions that we are in: the names that each one binds
        self.local = {}                                   # functions defined in functions

    def safe(self, name):
        return name + "_" * (name in RESERVED or name in self.modules)

    def refuse(self, node, what=None):
        raise Untranslated(f"{self.module}.py line {getattr(node, 'lineno', '?')}: {what or type(node).__name__} is not translated")

    # ------------------------------------------------------------------ statements: each returns lines
    def statement(self, node):
        return getattr(self, "do_" + type(node).__name__, self.refuse)(node)

    def body(self, statements):
        return indented([line for one in statements for line in self.statement(one)])

    def do_Expr(self, node):
        return [] if isinstance(node.value, ast.Constant) else [self.value(node.value) + ";"]

    def do_Pass(self, node):
        return []

    def do_Return(self, node):
        return [f"return {self.value(node.value)};" if node.value else "return null;"]

    def do_Raise(self, node):
        return [f"throw {self.value(node.exc)};" if node.exc else "throw error;"]

    def do_Continue(self, node):
        return ["continue;"]

    def do_Break(self, node):
        return ["break;"]

    def do_Assign(self, node):
        value = self.value(node.value)
        if not self.scopes:                               # at the top of a module
            return [f"const {self.target(node.targets[0])} = {value};"]
        if len(node.targets) > 1:
            first, *rest = reversed(node.targets)
            return [self.assigned(first, value), *(self.assigned(one, self.value(as_loaded(first))) for one in rest)]
        return [self.assigned(node.targets[0], value)]

    def do_AnnAssign(self, node):
        return self.do_Assign(ast.Assign([node.target], node.value)) if node.value else []

    def assigned(self, target, value):
        if isinstance(target, ast.Subscript):
            return f"py.set_item({self.value(target.value)}, {self.value(target.slice)}, {value});"
        if isinstance(target, (ast.Tuple, ast.List)):
            stars = [i for i, one in enumerate(target.elts) if isinstance(one, ast.Starred)]
            if stars and stars[0] < len(target.elts) - 1:
                value = f"py.unpack({value}, {stars[0]}, {len(target.elts) - 1 - stars[0]})"
                target = ast.Tuple([one.value if isinstance(one, ast.Starred) else one for one in target.elts])
            else:
                value = f"py.each({value})"
        return f"{self.target(target)} = {value};" if not self.target(target).startswith("[") else f"({self.target(target)} = {value});"

    def target(self, node):
        if isinstance(node, (ast.Tuple, ast.List)):
            return f"[{', '.join('' if getattr(one, 'id', '') == '_' else self.target(one) for one in node.elts)}]"
        if isinstance(node, ast.Starred):
            return "..." + self.target(node.value)
        return self.safe(node.id) if isinstance(node, ast.Name) else self.value(node)

    def do_AugAssign(self, node):
        name = {ast.Add: "iadd", ast.BitOr: "ior"}.get(type(node.op), DYNAMIC.get(type(node.op)))
        old, value = self.value(as_loaded(node.target)), self.value(node.value)
        return [self.assigned(node.target, f"py.{name}({old}, {value})" if name else f"{old} {ARITHMETIC[type(node.op)]} {value}")]

    def do_Delete(self, node):
        return [f"py.del_item({self.value(one.value)}, {self.value(one.slice)});" for one in node.targets]

    def do_If(self, node):
        lines = [f"if ({self.test(node.test)}) {{", *self.body(node.body), "}"]
        if node.orelse:
            lines[-1:] = ["} else {", *self.body(node.orelse), "}"]
        return lines

    def do_While(self, node):
        return [f"while ({self.test(node.test)}) {{", *self.body(node.body), "}"]

    def do_For(self, node):
        return [f"for ({self.target(node.target)} of py.each({self.value(node.iter)})) {{", *self.body(node.body), "}"]

    def do_Try(self, node):
        lines = ["try {", *self.body(node.body), "} catch (error) {"]
        kinds = []
        for handler in node.handlers:
            kinds = handler.type.elts if isinstance(handler.type, ast.Tuple) else [handler.type]
            is_one = " || ".join(f"error instanceof {self.value(kind)}" for kind in kinds)
            lines += indented([f"if ({is_one}) {{", *indented([f"{self.safe(handler.name)} = error;"] * bool(handler.name)),
                               *self.body(handler.body), "} else"])
        return [*lines, "  throw error;", "}"]

    def do_FunctionDef(self, node, method=False):
        cached = [one for one in node.decorator_list if getattr(getattr(one, "func", one), "id", "") in ("lru_cache", "cache")]
        is_property = [one for one in node.decorator_list if getattr(one, "id", "") == "property"]
        if len(cached) + len(is_property) < len(node.decorator_list):
            self.refuse(node, "this decorator")
        if self.scopes and not method:
            self.local[node.name] = node
        inside = [*without_functions(node.body)]
        star = "*" if any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in inside) else ""
        arguments = node.args
        params = [argument.arg for argument in [*arguments.args, arguments.vararg, *arguments.kwonlyargs, arguments.kwarg] if argument]
        bound = {one.id for one in inside if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        bound |= {one.name for one in inside if isinstance(one, ast.ExceptHandler) and one.name}
        bound -= set(params)
        inner = {one.name for one in node.body if isinstance(one, ast.FunctionDef)}
        self.scopes.append(bound | set(params) | inner)
        named = self.params(arguments, skip=method)
        lines = self.body(node.body)
        self.scopes.pop()
        own = indented([f"const {self.safe(one)} = this;" for one in params[:method]] + [f"let {', '.join(map(self.safe, sorted(bound)))};"] * bool(bound))
        if method:
            kind = "get " if is_property else ""
            name = "toString" if node.name == "__str__" else "constructor" if node.name == "__init__" else node.name
            return [f"{kind}{star}{name}({named}) {{", *own, *lines, "}"]
        head = f"function{star} {self.safe(node.name)}({named}) {{"
        lines = [head, *own, *lines, "}"]
        if cached:
            lines = [f"const {self.safe(node.name)} = py.cached({head}", *lines[1:-1], "});"]
        if node.name in self.by_name or arguments.kwarg:
            marked = ["**" * (argument is arguments.kwarg) + argument.arg for argument in [*arguments.args, arguments.kwarg] if argument]
            lines.append(f"{self.safe(node.name)}.parameters = {json.dumps(marked)};")
        return lines

    def params(self, arguments, skip=False):
        names = [argument.arg for argument in arguments.args]
        defaults = [None] * (len(names) - len(arguments.defaults)) + arguments.defaults
        found = [self.safe(name) + (f" = {self.value(default)}" if default else "") for name, default in zip(names, defaults)][skip:]
        found += [f"...{self.safe(arguments.vararg.arg)}"] if arguments.vararg else []
        if arguments.kwonlyargs:
            self.refuse(arguments.kwonlyargs[0], "a parameter after *")
        return ", ".join(found + ([f"{self.safe(arguments.kwarg.arg)} = py.dict()"] if arguments.kwarg else []))

    def do_ClassDef(self, node):
        kind = getattr(node.bases[0], "id", "") if node.bases else ""
        fields = [one for one in node.body if isinstance(one, ast.AnnAssign)]
        methods = [one for one in node.body if isinstance(one, ast.FunctionDef)]
        record = kind == "NamedTuple" or bool(node.decorator_list)           # dataclass
        base = "py.NamedTuple" if kind == "NamedTuple" else f"py.{kind}" if kind in EXCEPTIONS else self.safe(kind)
        lines = [f"class {self.safe(node.name)}{f' extends {base}' * bool(kind)} {{"]
        if record:
            named = ", ".join(self.safe(one.target.id) + (f" = {self.value(one.value)}" if one.value else "") for one in fields)
            inside = ["super();"] * bool(kind) + [f"this.{one.target.id} = {self.safe(one.target.id)};" for one in fields]
            defaults = ", ".join(f"[{quoted(one.target.id)}, {self.value(one.value)}]" for one in fields if one.value)
            lines += indented([f"static _fields = {json.dumps([one.target.id for one in fields])};",
                               f"static get _field_defaults() {{ return py.dict([{defaults}]); }}",
                               f"constructor({named}) {{", *indented(inside), "}"])
        for one in methods:
            lines += indented(self.do_FunctionDef(one, method=True))
        return [*lines, "}"]

    # ------------------------------------------------------------------ expressions: each returns text
    def value(self, node):
        return getattr(self, "of_" + type(node).__name__, self.refuse)(node)

    def test(self, node):
        """Return the text of a condition."""
        if isinstance(node, ast.BoolOp):
            return f"({(' && ' if isinstance(node.op, ast.And) else ' || ').join(map(self.test, node.values))})"
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return "!" + self.test(node.operand)
        return self.value(node) if isinstance(node, TRUE_OR_FALSE) else f"py.truth({self.value(node)})"

    def of_Constant(self, node):
        if node.value is None or isinstance(node.value, bool):
            return {None: "null", True: "true", False: "false"}[node.value]
        return quoted(node.value) if isinstance(node.value, str) else repr(node.value)

    def of_Name(self, node):
        name = node.id
        if any(name in scope for scope in self.scopes):
            return self.safe(name)
        if name in self.modules[self.module].statements:
            return self.safe(name)
        place = find(self.modules, self.module, node)
        if place:
            return f"{place[0]}.{self.safe(place[1])}"
        if name in BUILTINS | EXCEPTIONS:
            return "py." + name
        of, inside = self.modules[self.module].imported.get(name, (None, None))
        if of in LIBRARIES:
            return f"py.{of}" + (f".{inside}" if inside else "")
        return of if of in self.modules and inside is None else self.refuse(node, f"the name {name}")

    def of_Attribute(self, node):
        place = None if self.is_local(node.value) else find(self.modules, self.module, node)
        return f"{place[0]}.{self.safe(place[1])}" if place and place[0] != self.module else self.safe(place[1]) if place else (
            f"{self.value(node.value)}.{node.attr}")

    def is_local(self, node):
        return isinstance(node, ast.Name) and any(node.id in scope for scope in self.scopes)

    def of_Tuple(self, node):
        return f"[{', '.join(self.value(one) for one in node.elts)}]"

    of_List = of_Tuple

    def of_Set(self, node):
        return f"py.set([{', '.join(self.value(one) for one in node.elts)}])"

    def of_Starred(self, node):
        return f"...py.each({self.value(node.value)})"

    def of_Dict(self, node):
        pairs = [f"[{self.value(key)}, {self.value(value)}]" if key else f"...py.items({self.value(value)})"
                 for key, value in zip(node.keys, node.values)]
        return f"py.dict([{', '.join(pairs)}])"

    def of_NamedExpr(self, node):
        return f"({self.safe(node.target.id)} = {self.value(node.value)})"

    def of_IfExp(self, node):
        return f"({self.test(node.test)} ? {self.value(node.body)} : {self.value(node.orelse)})"

    def of_Lambda(self, node):
        self.scopes.append({argument.arg for argument in node.args.args})
        text = f"(({self.params(node.args)}) => {self.value(node.body)})"
        self.scopes.pop()
        return text

    def of_Yield(self, node):
        return f"yield {self.value(node.value)}"

    def of_YieldFrom(self, node):
        return f"yield* py.each({self.value(node.value)})"

    def of_BoolOp(self, node):
        if all(isinstance(one, TRUE_OR_FALSE) or isinstance(getattr(one, "op", None), ast.Not) for one in node.values):
            return self.test(node)
        name = "and" if isinstance(node.op, ast.And) else "or"
        text = self.value(node.values[-1])
        for one in reversed(node.values[:-1]):
            text = f"py.{name}({self.value(one)}, () => {text})"
        return text

    def of_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            return f"!{self.test(node.operand)}"
        return f"(-{self.value(node.operand)})" if isinstance(node.op, ast.USub) else self.refuse(node)

    def of_BinOp(self, node):
        left, right, kind = self.value(node.left), self.value(node.right), type(node.op)
        if kind in ARITHMETIC:
            return f"({left} {ARITHMETIC[kind]} {right})"
        return f"py.{DYNAMIC[kind]}({left}, {right})" if kind in DYNAMIC else self.refuse(node)

    def of_Compare(self, node):
        parts, left = [], node.left
        if len(node.ops) > 1 and not all(isinstance(one, (ast.Name, ast.Constant, ast.Attribute)) for one in node.comparators[:-1]):
            self.refuse(node, "a chain of comparisons around a computed value")
        for op, right in zip(node.ops, node.comparators):
            a, b = self.value(left), self.value(right)
            if type(op) in ORDER:
                parts.append(f"{a} {ORDER[type(op)]} {b}")
            elif isinstance(op, (ast.Is, ast.IsNot)):
                parts.append(f"{a} {'==' if isinstance(op, ast.Is) else '!='} {b}")      # null is undefined, too
            else:
                name = "eq" if isinstance(op, (ast.Eq, ast.NotEq)) else "in"
                parts.append("!" * isinstance(op, (ast.NotEq, ast.NotIn)) + f"py.{name}({a}, {b})")
            left = right
        return f"({' && '.join(parts)})"

    def of_Subscript(self, node):
        if isinstance(node.slice, ast.Slice):
            ends = (self.value(one) if one else "null" for one in (node.slice.lower, node.slice.upper, node.slice.step))
            return f"py.slice({self.value(node.value)}, {', '.join(ends)})"
        return f"py.get_item({self.value(node.value)}, {self.value(node.slice)})"

    def of_JoinedStr(self, node):
        if all(isinstance(one, ast.Constant) for one in node.values):
            return quoted("".join(one.value for one in node.values))
        return f"[{', '.join(self.value(one) for one in node.values)}].join(\"\")"

    def of_FormattedValue(self, node):
        value = self.value(node.value)
        value = f"py.repr({value})" if node.conversion == ord("r") else value
        return f"py.formatted({value}, {self.value(node.format_spec) if node.format_spec else quoted('')})"

    # ------------------------------------------------------------------ comprehensions
    def loops(self, generators, inside):
        """Return the loops of a comprehension around the text of what is done inside."""
        first, *rest = generators
        values = self.value(first.iter)
        self.scopes.append({node.id for node in ast.walk(first.target) if isinstance(node, ast.Name)})
        tests = "".join(f"if ({self.test(one)}) " for one in first.ifs)
        deep = self.loops(rest, inside) if rest else inside()
        self.scopes.pop()
        return f"for (const {self.target(first.target)} of py.each({values})) {tests}{deep}"

    def of_ListComp(self, node):
        return f"(() => {{ const all = []; {self.loops(node.generators, lambda: f'all.push({self.value(node.elt)});')} return all; }})()"

    def of_SetComp(self, node):
        return f"py.set({self.of_ListComp(node)})"

    def of_DictComp(self, node):
        return f"py.dict({self.of_ListComp(ast.ListComp(ast.Tuple([node.key, node.value]), node.generators))})"

    def of_GeneratorExp(self, node):
        return f"(function* () {{ {self.loops(node.generators, lambda: f'yield {self.value(node.elt)};')} }})()"

    # ------------------------------------------------------------------ calls
    def of_Call(self, node):
        func = node.func
        name = func.id if isinstance(func, ast.Name) else func.attr if isinstance(func, ast.Attribute) else ""
        plain = isinstance(func, ast.Name) and not self.is_local(func) and find(self.modules, self.module, func) is None
        if plain and name == "isinstance":
            return self.is_instance(*node.args)
        place = None if self.is_local(func) or isinstance(func, ast.Attribute) and self.is_local(func.value) else find(
            self.modules, self.module, func)
        known = self.modules[place[0]].statements.get(place[1]) if place else self.local.get(name) if isinstance(func, ast.Name) else None
        method = isinstance(func, ast.Attribute) and place is None and not self.is_library(func.value)
        if method and name == "_replace":
            return f"py.replaced({self.value(func.value)}, {self.keywords(node.keywords)})"
        arguments = [self.argument(one, name if plain else "") for one in node.args]
        if method and name in METHODS:
            arguments.insert(0, self.value(func.value))
            callee = "py.add_to" if name == "add" else f"py.{name}"             # py.add is the operator
        else:
            callee = self.value(func)
        if plain and name in ("dict", "SimpleNamespace"):
            return f"py.{name}({', '.join([*arguments, *[self.keywords(node.keywords)] * bool(node.keywords)])})"
        new = "new " * (isinstance(known, ast.ClassDef) or plain and name in EXCEPTIONS)
        if not node.keywords:
            return f"{new}{callee}({', '.join(arguments)})"
        if (plain or method) and name in BY_KEYWORD:
            given = {one.arg: self.value(one.value) for one in node.keywords}
            return f"{callee}_with({arguments[0]}, {', '.join(given.get(one, 'undefined') for one in BY_KEYWORD[name])})"
        if any(one.arg is None for one in node.keywords):
            return f"py.call({callee}, [{', '.join(arguments)}], {self.keywords(node.keywords)})"
        if known is None or isinstance(known, ast.Assign):
            self.refuse(node, f"{ast.unparse(func)}() with keywords")
        return f"{new}{callee}({', '.join(self.in_order(node, known, arguments))})"

    def is_library(self, node):
        return isinstance(node, ast.Name) and self.modules[self.module].imported.get(node.id, ("",))[0] in LIBRARIES

    def argument(self, node, function):
        """Return an argument. Functions that use all of a generator get a list, which is faster."""
        if isinstance(node, ast.GeneratorExp) and function in ("sum", "max", "min", "sorted", "list", "tuple", "set", "dict"):
            return self.of_ListComp(node)
        return self.value(node)

    def in_order(self, node, known, arguments):
        """Return the arguments of a call with those given by keyword in the places where the function takes them."""
        arguments, rest = list(arguments), []
        if isinstance(known, ast.ClassDef):
            init = next((one for one in known.body if getattr(one, "name", "") == "__init__"), None)
            names = [one.arg for one in init.args.args[1:]] if init else [
                one.target.id for one in known.body if isinstance(one, ast.AnnAssign)]
        else:
            names = [one.arg for one in known.args.args]
        given = {one.arg: self.value(one.value) for one in node.keywords}
        for name in names[len(arguments):]:
            arguments.append(given.pop(name, "undefined"))
        if given:
            if isinstance(known, ast.ClassDef) or not known.args.kwarg:
                self.refuse(node, f"the keyword {next(iter(given))}")
            rest = [f"py.dict({{{', '.join(f'{name}: {value}' for name, value in given.items())}}})"]
        while not rest and arguments and arguments[-1] == "undefined":
            arguments.pop()
        return arguments + rest

    def keywords(self, keywords):
        return "{" + ", ".join(f"{one.arg}: {self.value(one.value)}" if one.arg else f"...py.object({self.value(one.value)})"
                               for one in keywords) + "}"

    def is_instance(self, value, kind):
        value = self.value(value)
        types = dict(str=f'typeof {value} === "string"', int=f"Number.isInteger({value})", dict=f"{value} instanceof py.Dict")
        return f"({types.get(getattr(kind, 'id', '')) or f'{value} instanceof {self.value(kind)}'})"


def as_loaded(node):
    return ast.parse(ast.unparse(node), mode="eval").body


def without_functions(nodes):
    """Yield all nodes of a function's body, but not those of functions inside it, nor what comprehensions bind."""
    for node in nodes:
        if isinstance(node, (ast.FunctionDef, ast.Lambda)):
            continue
        yield node
        for child in ast.iter_child_nodes(node):
            if isinstance(child, ast.comprehension):
                yield from without_functions([child.iter, *child.ifs])
            else:
                yield from without_functions([child])


def script(trees, wanted=None):
    return (HERE / "python.js").read_text(encoding="utf-8") + "\n" + translate(trees, wanted)


if __name__ == "__main__":
    print(script({Path(path).stem: parse(path) for path in sys.argv[1:]}))
