"""Translate Python modules to JavaScript, so that a page computes with the same formulas as the command line.

    python tools/plan/to_js.py step08_5d/schedules.py > schedules.js

It takes the part of Python that such modules use: functions, generators, lambdas, comprehensions, NamedTuples and other small
classes, exceptions, f-strings. It refuses whatever else it meets. An operator whose meaning depends on its operands' types becomes
a call of a function in python.js, which does what Python does. Two differences remain: str(2.0) is "2", and integers are exact
only up to 2**53.
"""
import ast
import json
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
RESERVED = set("arguments await case catch const debugger default delete do enum eval export extends false function implements in "
               "instanceof interface let new null package private protected public py static super switch this throw true typeof "
               "var void".split())
BUILTINS = set("abs all any bool dict enumerate filter float getattr hasattr int iter len list map max min next range reversed "
               "round set sorted str sum tuple zip Counter SimpleNamespace count defaultdict deque".split())
EXCEPTIONS = {"Exception", "RuntimeError", "ValueError", "KeyError", "TypeError"}
LIBRARIES = {"math", "shlex"}                             # python.js has those of their functions that we use
METHODS = set("append add remove index pop popleft sort items keys values get setdefault join split partition startswith endswith "
              "removeprefix lower format isdecimal _asdict".split())
BY_KEYWORD = dict(max=("key", "default"), min=("key", "default"), sorted=("key", "reverse"), sort=("key", "reverse"),
                  enumerate=("start",), sum=("start",), zip=("strict",))
AS_IN_JAVASCRIPT = {ast.Sub: "-", ast.Div: "/", ast.Pow: "**", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">=",
                    ast.Is: "==", ast.IsNot: "!="}        # undefined == null: a function without return returns None
BY_TYPE = {ast.Add: "add", ast.Mult: "mul", ast.Mod: "mod", ast.FloorDiv: "floordiv", ast.BitAnd: "bit_and", ast.BitOr: "bit_or",
           ast.Eq: "eq", ast.In: "in", ast.NotEq: "!eq", ast.NotIn: "!in"}
IN_PLACE = {ast.Add: "iadd", ast.BitOr: "ior"}            # a list or set that has another name changes there, too


class Untranslated(Exception):
    """The module has something that this translator does not know."""


def parse(path):
    return ast.parse(Path(path).read_text(encoding="utf-8"))


# ---------------------------------------------------------------------- modules, and what of them is needed
class Module:
    """A module: its statements by the names that they define, and where its other names are defined."""
    def __init__(self, tree, modules):
        self.statements, self.imported = {}, {}           # imported: name -> (module, name there; or None for the module itself)
        for statement in tree.body:
            if isinstance(statement, (ast.Import, ast.ImportFrom)):
                of = getattr(statement, "module", None)
                for alias in statement.names:
                    whole = of is None or alias.name in modules
                    place = (alias.name, None) if whole else (of.split(".")[-1], alias.name)
                    self.imported[alias.asname or alias.name] = place
            else:
                self.statements.update(dict.fromkeys(names_of(statement), statement))


def names_of(statement):
    """Return the names that a statement at the top of a module defines."""
    if isinstance(statement, ast.Assign):
        return [node.id for target in statement.targets for node in ast.walk(target) if isinstance(node, ast.Name)]
    return [statement.name] if isinstance(statement, (ast.FunctionDef, ast.ClassDef)) else []


def find(modules, module, node):
    """Return the (module, name) that defines what a Name or an Attribute of a module means; None if it is something else."""
    if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
        there, name = modules[module].imported.get(node.value.id, (None, ""))
        return find(modules, there, ast.Name(node.attr)) if name is None and there in modules else None
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
        module, name = place = to_see.pop()
        if place in found:
            continue
        found.add(place)
        if name not in modules[module].statements:
            raise Untranslated(f"{module} does not define {name}")
        statement = modules[module].statements[name]
        to_see += [(module, other) for other in names_of(statement)]
        to_see += filter(None, (find(modules, module, node) for node in without_hints(statement)))
    return found


def without_hints(node):
    """Yield a node and all nodes in it, but for type hints."""
    yield node
    hints = getattr(node, "annotation", None), getattr(node, "returns", None)
    for child in ast.iter_child_nodes(node):
        if child not in hints:
            yield from without_hints(child)


def translate(trees, wanted=None):
    """Return JavaScript that defines one object for each module of {name: tree}, which must be in the order of their imports.

    With wanted, a list of "module.name", leave out what those do not need. python.js has to come first.
    """
    modules = {name: Module(tree, trees) for name, tree in trees.items()}
    every = {(name, one) for name, module in modules.items() for one in module.statements}
    needed = every if wanted is None else reachable(modules, [tuple(one.split(".")) for one in wanted])
    # a function that is called with ** must know the names of its parameters when the page runs
    calls = [call for tree in trees.values() for call in ast.walk(tree) if isinstance(call, ast.Call)]
    starred = {getattr(call.func, "id", getattr(call.func, "attr", "")) for call in calls if None in [k.arg for k in call.keywords]}
    parts = []
    for name, module in modules.items():
        mine = {one: statement for one, statement in module.statements.items() if (name, one) in needed}
        if mine:
            writer = Writer(modules, name, starred)
            lines = [line for statement in dict.fromkeys(mine.values()) for line in writer.statement(statement)]
            lines.append(f"return {{ {', '.join(map(writer.safe, mine))} }};")
            parts.append("\n".join([f"const {name} = (() => {{", *indented(lines), "})();\n"]))
    return "\n".join(parts)


def script(trees, wanted=None):
    return (HERE / "python.js").read_text(encoding="utf-8") + "\n" + translate(trees, wanted)


# ---------------------------------------------------------------------- statements and expressions
def indented(lines):
    return ["  " + line for line in lines]


def inside(nodes):
    """Yield all nodes of a function's body, but not those of functions inside it, nor the names that comprehensions bind."""
    for node in nodes:
        if not isinstance(node, (ast.FunctionDef, ast.Lambda)):
            yield node
            children = [node.iter, *node.ifs] if isinstance(node, ast.comprehension) else ast.iter_child_nodes(node)
            yield from inside(children)


def as_loaded(node):
    return ast.parse(ast.unparse(node), mode="eval").body


class Writer:
    """Write the statements and expressions of one module: do_X those of a statement X, as lines, of_X those of an expression."""
    def __init__(self, modules, module, starred):
        self.modules, self.module, self.starred = modules, module, starred
        self.scopes, self.local = [], {}                  # names that each function around us binds; functions in functions

    def refuse(self, node, what=None):
        raise Untranslated(f"{self.module}.py line {getattr(node, 'lineno', '?')}: {what or type(node).__name__} is not translated")

    def safe(self, name):
        return name + "_" * (name in RESERVED or name in self.modules)

    def is_local(self, node):
        return isinstance(node, ast.Name) and any(node.id in scope for scope in self.scopes)

    def statement(self, node):
        return getattr(self, "do_" + type(node).__name__, self.refuse)(node)

    def body(self, statements):
        return indented([line for one in statements for line in self.statement(one)])

    def value(self, node):
        return getattr(self, "of_" + type(node).__name__, self.refuse)(node)

    def values(self, nodes):
        return ", ".join(map(self.value, nodes))

    # ------------------------------------------------------------------ statements
    def do_Expr(self, node):
        return [] if isinstance(node.value, ast.Constant) else [self.value(node.value) + ";"]

    def do_Pass(self, node):
        return []

    def do_Continue(self, node):
        return ["continue;"]

    def do_Break(self, node):
        return ["break;"]

    def do_Return(self, node):
        return [f"return {self.value(node.value)};" if node.value else "return null;"]

    def do_Raise(self, node):
        return [f"throw {self.value(node.exc)};"]

    def do_Assign(self, node):
        first, *rest = node.targets[::-1]
        if not self.scopes:                               # at the top of a module
            return [f"const {self.target(first)} = {self.value(node.value)};"]
        return [self.assigned(first, self.value(node.value)), *(self.assigned(one, self.value(as_loaded(first))) for one in rest)]

    def do_AugAssign(self, node):
        changed = ast.BinOp(as_loaded(node.target), node.op, node.value)
        return [self.assigned(node.target, self.of_BinOp(changed, IN_PLACE.get(type(node.op))))]

    def assigned(self, target, value):
        if isinstance(target, ast.Subscript):
            return f"py.set_item({self.value(target.value)}, {self.value(target.slice)}, {value});"
        if not isinstance(target, (ast.Tuple, ast.List)):
            return f"{self.target(target)} = {value};"
        stars = [i for i, one in enumerate(target.elts) if isinstance(one, ast.Starred)]
        if stars and stars[0] < len(target.elts) - 1:     # in JavaScript only the last can have a star
            plain = [one.value if isinstance(one, ast.Starred) else one for one in target.elts]
            return f"({self.target(ast.Tuple(plain))} = py.unpack({value}, {stars[0]}, {len(plain) - 1 - stars[0]}));"
        return f"({self.target(target)} = py.each({value}));"

    def target(self, node):
        if isinstance(node, (ast.Tuple, ast.List)):       # JavaScript allows no name twice, but holes
            return f"[{', '.join('' if getattr(one, 'id', '') == '_' else self.target(one) for one in node.elts)}]"
        if isinstance(node, ast.Starred):
            return "..." + self.target(node.value)
        return self.safe(node.id) if isinstance(node, ast.Name) else self.value(node)

    def do_If(self, node):
        lines = [f"if ({self.test(node.test)}) {{", *self.body(node.body), "}"]
        return lines[:-1] + ["} else {", *self.body(node.orelse), "}"] if node.orelse else lines

    def do_While(self, node):
        return [f"while ({self.test(node.test)}) {{", *self.body(node.body), "}"]

    def do_For(self, node):
        return [f"for ({self.target(node.target)} of py.each({self.value(node.iter)})) {{", *self.body(node.body), "}"]

    def do_Try(self, node):
        lines = ["try {", *self.body(node.body), "} catch (error) {"]
        for handler in node.handlers:
            named = indented([f"{self.safe(handler.name)} = error;"] * bool(handler.name))
            lines += indented([f"if (error instanceof {self.value(handler.type)}) {{", *named, *self.body(handler.body), "} else"])
        return [*lines, "  throw error;", "}"]

    def do_FunctionDef(self, node, method=False):
        marks = [getattr(getattr(one, "func", one), "id", "") for one in node.decorator_list]
        cached, is_property = "lru_cache" in marks, "property" in marks
        if len(marks) > cached + is_property:
            self.refuse(node, "this decorator")
        if self.scopes:
            self.local[node.name] = node
        all_in_it = [*inside(node.body)]
        star = "*" if any(isinstance(one, (ast.Yield, ast.YieldFrom)) for one in all_in_it) else ""
        names = [one.arg for one in [*node.args.args, node.args.kwarg] if one]
        bound = {one.id for one in all_in_it if isinstance(one, ast.Name) and isinstance(one.ctx, ast.Store)}
        bound = sorted(bound.union(one.name for one in all_in_it if isinstance(one, ast.ExceptHandler) and one.name) - {*names})
        self.scopes.append({*bound, *names, *(one.name for one in node.body if isinstance(one, ast.FunctionDef))})
        head, lines = f"({self.parameters(node.args, skip=method)}) {{", self.body(node.body)
        self.scopes.pop()
        lines = indented([f"let {', '.join(map(self.safe, bound))};"] if bound else []) + lines
        lines = indented([f"const {self.safe(one)} = this;" for one in names[:method]]) + lines
        if method:
            name = {"__str__": "toString", "__init__": "constructor"}.get(node.name, node.name)
            return ["get " * is_property + star + name + head, *lines, "}"]
        name = self.safe(node.name)
        if cached:
            return [f"const {name} = py.cached(function {name}{head}", *lines, "});"]
        keywords = [*names[:-1], "**" + names[-1]] if node.args.kwarg else names
        known = [f"{name}.parameters = {json.dumps(keywords)};"] * (node.name in self.starred)
        return [f"function{star} {name}{head}", *lines, "}", *known]

    def parameters(self, arguments, skip=False):
        if arguments.vararg or arguments.kwonlyargs:
            self.refuse(arguments.vararg or arguments.kwonlyargs[0], "a parameter after *")
        defaults = [None] * (len(arguments.args) - len(arguments.defaults)) + arguments.defaults
        found = [self.safe(one.arg) + (f" = {self.value(default)}" if default else "")
                 for one, default in zip(arguments.args, defaults)][skip:]
        return ", ".join(found + ([f"{self.safe(arguments.kwarg.arg)} = py.dict()"] if arguments.kwarg else []))

    def do_ClassDef(self, node):
        base = getattr(node.bases[0], "id", "") if node.bases else ""
        of = "" if not base else f" extends {'py.' * (base == 'NamedTuple' or base in EXCEPTIONS)}{self.safe(base)}"
        lines, fields = [], [one for one in node.body if isinstance(one, ast.AnnAssign)]
        if fields:                                        # a NamedTuple or a dataclass
            names = [one.target.id for one in fields]
            takes = ", ".join(self.safe(one.target.id) + (f" = {self.value(one.value)}" if one.value else "") for one in fields)
            defaults = ", ".join(f"{one.target.id}: {self.value(one.value)}" for one in fields if one.value)
            sets = ["super();"] * bool(base) + [f"this.{name} = {self.safe(name)};" for name in names]
            lines = [f"static _fields = {json.dumps(names)};",
                     f"static get _field_defaults() {{ return py.dict({{ {defaults} }}); }}",
                     f"constructor({takes}) {{", *indented(sets), "}"]
        for one in node.body:
            lines += self.do_FunctionDef(one, method=True) if isinstance(one, ast.FunctionDef) else []
        return [f"class {self.safe(node.name)}{of} {{", *indented(lines), "}"]

    # ------------------------------------------------------------------ expressions
    def of_Constant(self, node):
        return "null" if node.value is None else json.dumps(node.value)

    def of_Name(self, node):
        name, module = node.id, self.modules[self.module]
        if self.is_local(node) or name in module.statements:
            return self.safe(name)
        there, inside = find(self.modules, self.module, node) or module.imported.get(name, (None, None))
        if name in BUILTINS | EXCEPTIONS or there in LIBRARIES:
            return f"py.{name}" if there not in LIBRARIES or inside is None else f"py.{there}.{inside}"
        if there not in self.modules:
            self.refuse(node, f"the name {name}")
        return f"{there}.{self.safe(inside)}" if inside else there

    def of_Attribute(self, node):
        place = None if self.is_local(node.value) else find(self.modules, self.module, node)
        if place is None:
            return f"{self.value(node.value)}.{node.attr}"
        return self.safe(place[1]) if place[0] == self.module else f"{place[0]}.{self.safe(place[1])}"

    def of_Tuple(self, node):
        return f"[{self.values(node.elts)}]"

    of_List = of_Tuple

    def of_Set(self, node):
        return f"py.set([{self.values(node.elts)}])"

    def of_Starred(self, node):
        return f"...py.each({self.value(node.value)})"

    def of_Dict(self, node):
        pairs = [f"[{self.value(key)}, {self.value(value)}]" if key else f"...py.items({self.value(value)})"
                 for key, value in zip(node.keys, node.values)]
        return f"py.dict([{', '.join(pairs)}])"

    def of_NamedExpr(self, node):
        return f"({self.safe(node.target.id)} = {self.value(node.value)})"

    def of_Lambda(self, node):
        self.scopes.append({argument.arg for argument in node.args.args})
        text = f"(({self.parameters(node.args)}) => {self.value(node.body)})"
        self.scopes.pop()
        return text

    def of_Yield(self, node):
        return f"yield {self.value(node.value)}"

    def of_YieldFrom(self, node):
        return f"yield* py.each({self.value(node.value)})"

    # an empty list is true in JavaScript, so conditions are asked for their truth, unless they are comparisons
    def test(self, node):
        if isinstance(node, ast.BoolOp):
            return f"({(' && ' if isinstance(node.op, ast.And) else ' || ').join(map(self.test, node.values))})"
        is_bool = isinstance(node, ast.Compare) or isinstance(getattr(node, "op", None), ast.Not)
        return self.value(node) if is_bool else f"py.truth({self.value(node)})"

    def of_IfExp(self, node):
        return f"({self.test(node.test)} ? {self.value(node.body)} : {self.value(node.orelse)})"

    def of_BoolOp(self, node):
        name, text = "and" if isinstance(node.op, ast.And) else "or", self.value(node.values[-1])
        for one in node.values[-2::-1]:
            text = f"py.{name}({self.value(one)}, () => {text})"
        return text

    def of_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            return f"!{self.test(node.operand)}"
        return f"(-{self.value(node.operand)})" if isinstance(node.op, ast.USub) else self.refuse(node)

    def operation(self, op, left, right):
        if op in AS_IN_JAVASCRIPT:
            return f"{left} {AS_IN_JAVASCRIPT[op]} {right}"
        name = BY_TYPE[op]
        return "!" * name.startswith("!") + f"py.{name.lstrip('!')}({left}, {right})"

    def of_BinOp(self, node, in_place=None):
        left, right, op = self.value(node.left), self.value(node.right), type(node.op)
        if op not in AS_IN_JAVASCRIPT and op not in BY_TYPE:
            self.refuse(node, type(node.op).__name__)
        return f"py.{in_place}({left}, {right})" if in_place else f"({self.operation(op, left, right)})"

    def of_Compare(self, node):
        operands = [node.left, *node.comparators]
        if not all(isinstance(one, (ast.Name, ast.Constant, ast.Attribute)) for one in operands[1:-1]):
            self.refuse(node, "a chain of comparisons around a computed value")
        text = [self.value(one) for one in operands]
        return f"({' && '.join(self.operation(type(op), *pair) for op, *pair in zip(node.ops, text, text[1:]))})"

    def of_Subscript(self, node):
        if isinstance(node.slice, ast.Slice):
            ends = (self.value(one) if one else "null" for one in (node.slice.lower, node.slice.upper, node.slice.step))
            return f"py.slice({self.value(node.value)}, {', '.join(ends)})"
        return f"py.get_item({self.value(node.value)}, {self.value(node.slice)})"

    def of_JoinedStr(self, node):
        if all(isinstance(one, ast.Constant) for one in node.values):
            return json.dumps("".join(one.value for one in node.values))
        return f"[{self.values(node.values)}].join(\"\")"

    def of_FormattedValue(self, node):
        value = f"py.repr({self.value(node.value)})" if node.conversion == ord("r") else self.value(node.value)
        return f"py.formatted({value}, {self.value(node.format_spec)})" if node.format_spec else f"py.str({value})"

    # ------------------------------------------------------------------ comprehensions
    def loops(self, generators, element):
        """Return the loops of a comprehension around the text that element() returns."""
        first, *rest = generators
        values = self.value(first.iter)
        self.scopes.append({node.id for node in ast.walk(first.target) if isinstance(node, ast.Name)})
        tests = "".join(f"if ({self.test(one)}) " for one in first.ifs)
        deep = self.loops(rest, element) if rest else element()
        self.scopes.pop()
        return f"for (const {self.target(first.target)} of py.each({values})) {tests}{deep}"

    def of_ListComp(self, node):
        loops = self.loops(node.generators, lambda: f"all.push({self.value(node.elt)});")
        return f"(() => {{ const all = []; {loops} return all; }})()"

    def of_SetComp(self, node):
        return f"py.set({self.of_ListComp(node)})"

    def of_DictComp(self, node):
        return f"py.dict({self.of_ListComp(ast.ListComp(ast.Tuple([node.key, node.value]), node.generators))})"

    def of_GeneratorExp(self, node):
        return f"(function* () {{ {self.loops(node.generators, lambda: f'yield {self.value(node.elt)};')} }})()"

    # ------------------------------------------------------------------ calls
    def of_Call(self, node):
        func, module = node.func, self.modules[self.module]
        name = getattr(func, "id", getattr(func, "attr", ""))
        local = self.is_local(func) or isinstance(func, ast.Attribute) and self.is_local(func.value)
        there, what = (None if local else find(self.modules, self.module, func)) or (None, None)
        known = self.modules[there].statements[what] if there else self.local.get(name) if isinstance(func, ast.Name) else None
        builtin = isinstance(func, ast.Name) and not local and known is None
        library = isinstance(func, ast.Attribute) and module.imported.get(getattr(func.value, "id", ""), ("",))[0] in LIBRARIES
        method = isinstance(func, ast.Attribute) and there is None and not library
        if builtin and name == "isinstance":
            return self.is_instance(*node.args)
        if method and name == "_replace":
            return f"py.replaced({self.value(func.value)}, {self.keywords(node)})"
        # functions that use all of a generator get a list, which is faster
        whole = builtin and name in ("sum", "max", "min", "sorted", "list", "tuple", "set", "dict")
        arguments = [self.of_ListComp(one) if whole and isinstance(one, ast.GeneratorExp) else self.value(one) for one in node.args]
        callee = self.value(func)
        if method and name in METHODS:
            callee, arguments = f"py.{name}{'_to' * (name == 'add')}", [self.value(func.value), *arguments]
        if node.keywords:
            if builtin and name in ("dict", "SimpleNamespace"):
                arguments.append(self.keywords(node))
            elif (builtin or method) and name in BY_KEYWORD:
                given = {one.arg: self.value(one.value) for one in node.keywords}
                callee, arguments = callee + "_with", [*arguments, *(given.get(one, "undefined") for one in BY_KEYWORD[name])]
            elif None in [one.arg for one in node.keywords]:
                return f"py.call({callee}, [{', '.join(arguments)}], {self.keywords(node)})"
            else:
                arguments = self.in_order(node, known, arguments)
        new = "new " * (isinstance(known, ast.ClassDef) or builtin and name in EXCEPTIONS)
        return f"{new}{callee}({', '.join(arguments)})"

    def in_order(self, node, known, arguments):
        """Return the arguments of a call with those given by keyword in the places where the function takes them."""
        if not isinstance(known, (ast.ClassDef, ast.FunctionDef)):
            self.refuse(node, f"{ast.unparse(node.func)}() with keywords")
        function = known
        if isinstance(known, ast.ClassDef):
            function = next((one for one in known.body if getattr(one, "name", "") == "__init__"), None)
        names = [one.arg for one in function.args.args] if function else [
            one.target.id for one in known.body if isinstance(one, ast.AnnAssign)]
        names = names[1:] if function is not known and function else names                     # without self
        given = {one.arg: self.value(one.value) for one in node.keywords}
        arguments = arguments + [given.pop(name, "undefined") for name in names[len(arguments):]]
        if given and not (function and function.args.kwarg):
            self.refuse(node, f"the keyword {next(iter(given))}")
        if given:
            return [*arguments, f"py.dict({{{', '.join(f'{name}: {value}' for name, value in given.items())}}})"]
        while arguments[-1] == "undefined":
            arguments.pop()
        return arguments

    def keywords(self, node):
        pairs = (f"{one.arg}: {self.value(one.value)}" if one.arg else f"...py.object({self.value(one.value)})"
                 for one in node.keywords)
        return f"{{ {', '.join(pairs)} }}"

    def is_instance(self, node, kind):
        value = self.value(node)
        return f'(typeof {value} === "string")' if getattr(kind, "id", "") == "str" else f"({value} instanceof {self.value(kind)})"


if __name__ == "__main__":
    print(script({Path(path).stem: parse(path) for path in sys.argv[1:]}))
