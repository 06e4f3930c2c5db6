"""Python to JavaScript: functions, and all that they call in the files here, for the planner's page.

It knows as much Python as those files use, and stops with the line at anything else. Python's own functions
(sum, sorted, ...) are written by hand in plan_page.html. Lists and tuples are arrays, dicts and namespaces
objects; a tuple as a key is "a,b"; generator expressions are made at once; integers are exact up to 2**53;
what is divided with % must not be negative.
"""
import ast
import json
from pathlib import Path

import trainer

HERE = Path(__file__).resolve().parent
MODULES = ("trainer", "costs", "speed", "plan", "explain", "plan_page")     # each after those that it imports
GIVEN = ("refuse", "torch")               # written by hand in plan_page.html, like Python's own functions
OPERATORS = {
    ast.Add: "+", ast.Sub: "-", ast.Mult: "*", ast.Div: "/", ast.Mod: "%", ast.Pow: "**",
    ast.Eq: "===", ast.NotEq: "!==", ast.Lt: "<", ast.LtE: "<=", ast.Gt: ">", ast.GtE: ">="}
PARAMETERS = {"sorted": ("iterable", "key", "reverse")}


def translate(start, *roots):
    """Functions of the module `start`, and what they need of the others; each module is an object of its
    own."""
    known = {name: definitions(nodes(name)) for name in MODULES}
    needed, todo = {name: {} for name in MODULES}, [(start, root) for root in roots]
    while todo:
        module, name = todo.pop()
        if name in needed[module] or name in GIVEN:
            continue
        node = needed[module][name] = known[module][name]
        if isinstance(node, ast.ImportFrom):
            todo += [(node.module, name)] * (node.module in MODULES)
            continue
        todo += [(owner, name) for owner, name in mentioned(node, module) if name in known.get(owner, {})]
    called = [node for nodes in needed.values() for node in nodes.values() if is_callable(node)]
    translator = Translator({node.name: signature(node) for node in called})
    parts = []
    for name in MODULES:
        in_order = [known[name][part] for part in known[name] if part in needed[name]]
        parts.append(translator.module(name, in_order, list(needed[name])))
    return "\n".join(parts)


def mentioned(node, module):
    """(module, name) of all that may be another function or constant: names, and attributes of names."""
    for part in ast.walk(node):
        if isinstance(part, ast.Name):
            yield module, part.id
        if isinstance(part, ast.Attribute) and isinstance(part.value, ast.Name):
            yield part.value.id, part.attr


def nodes(name):
    """A module from top to bottom; what the planner runs of the trainer's files is one of them."""
    if name == "trainer":
        return [node for path in trainer.FILES for node in trainer.definitions(path).body]
    return ast.parse((HERE / f"{name}.py").read_text()).body


def definitions(nodes):
    """{name: node} of a module: functions, classes, constants, and what it imports from the others."""
    found = {}
    for node in nodes:
        if is_callable(node):
            found[node.name] = node
        elif isinstance(node, ast.Assign):
            found |= {name: node for target in node.targets for name in names_in(target)}
        elif isinstance(node, ast.ImportFrom) and node.module in MODULES:
            found |= {alias.name: node for alias in node.names}
    return found


def is_callable(node):
    return isinstance(node, (ast.FunctionDef, ast.ClassDef))


def names_in(node):
    return [part.id for part in ast.walk(node) if isinstance(part, ast.Name)]


def signature(node):
    """(whether it is a class, names of its parameters or fields)"""
    if isinstance(node, ast.ClassDef):
        return True, [field.target.id for field in node.body if isinstance(field, ast.AnnAssign)]
    return False, [arg.arg for arg in node.args.args]


def is_list(node):
    if isinstance(node, ast.BinOp):
        return is_list(node.left) or is_list(node.right)
    return isinstance(node, (ast.List, ast.ListComp))


class Translator(ast.NodeVisitor):
    """Each method returns JavaScript."""

    def __init__(self, signatures):
        self.signatures = signatures

    def generic_visit(self, node):
        raise NotImplementedError(f"line {getattr(node, 'lineno', '?')}: {ast.unparse(node)}")

    def module(self, name, nodes, names):
        """The nodes that define the names."""
        lines = "\n".join(self.top(node, names) for node in dict.fromkeys(nodes))
        return f"const {name} = (() => {{\n{lines}\nreturn {{{', '.join(names)}}};\n}})();"

    def top(self, node, names):
        if isinstance(node, ast.ImportFrom):
            taken = ", ".join(part.name for part in node.names if part.name in names)
            return f"const {{{taken}}} = {node.module};"
        return f"const {self.visit(node)}" if isinstance(node, ast.Assign) else self.visit(node)

    def each(self, nodes):
        return ", ".join(map(self.visit, nodes))

    def block(self, nodes, first=""):
        return "{\n" + "\n".join([first, *map(self.visit, nodes)]).lstrip("\n") + "\n}"

    # statements
    def visit_FunctionDef(self, node):
        star = "*" if any(isinstance(part, (ast.Yield, ast.YieldFrom)) for part in ast.walk(node)) else ""
        return f"function{star} {node.name}{self.function(node)}"

    def function(self, node):
        args = [arg.arg for arg in node.args.args]
        defaults = [f" = {self.visit(value)}" for value in node.args.defaults]
        defaults = [""] * (len(args) - len(defaults)) + defaults
        return f"({', '.join(map(str.__add__, args, defaults))}) {self.block(node.body, self.declared(node))}"

    def declared(self, node):
        """Local names, but for those inside of comprehensions."""
        parts = list(ast.walk(node))
        loops = [part.target for part in parts if isinstance(part, ast.comprehension)]
        skipped = {id(part) for target in loops for part in ast.walk(target)}
        stored = [part for part in parts if isinstance(part, ast.Name) and isinstance(part.ctx, ast.Store)]
        names = dict.fromkeys(part.id for part in stored if id(part) not in skipped)
        names = [name for name in names if name not in [arg.arg for arg in node.args.args]]
        return f"let {', '.join(names)};" if names else ""

    def visit_ClassDef(self, node):
        fields = [field for field in node.body if isinstance(field, ast.AnnAssign) and field.value]
        usual = ", ".join(f"{field.target.id}: {self.visit(field.value)}" for field in fields)
        constructor = f"constructor(given) {{ Object.assign(this, {{{usual}}}, given); }}"
        getters = [self.getter(part) for part in node.body if isinstance(part, ast.FunctionDef)]
        return "\n".join([f"class {node.name} {{", constructor, *getters, "}"])

    def getter(self, node):
        return f"get {node.name}() {self.block(node.body, 'const self = this; ' + self.declared(node))}"

    def visit_Expr(self, node):
        if isinstance(node.value, ast.Constant):          # a docstring
            return f"/* {node.value.value} */"
        return f"{self.visit(node.value)};"

    def visit_Assign(self, node):
        return " = ".join(map(self.visit, [*node.targets, node.value])) + ";"

    def visit_AugAssign(self, node):
        target, value = self.visit(node.target), self.visit(node.value)
        if is_list(node.value):
            return f"{target}.push(...{value});"
        if isinstance(node.op, ast.BitOr):
            return f"Object.assign({target}, {value});"
        return f"{target} {OPERATORS[type(node.op)]}= {value};"

    def visit_Return(self, node):
        return f"return {self.visit(node.value) if node.value else ''};"

    def visit_If(self, node):
        otherwise = f" else {self.block(node.orelse)}" if node.orelse else ""
        return f"if ({self.test(node.test)}) {self.block(node.body)}{otherwise}"

    def visit_While(self, node):
        return f"while ({self.test(node.test)}) {self.block(node.body)}"

    def visit_For(self, node):
        return f"for ({self.visit(node.target)} of {self.visit(node.iter)}) {self.block(node.body)}"

    # expressions
    def visit_Name(self, node):
        return node.id

    def visit_Constant(self, node):
        return json.dumps(node.value)

    def visit_Attribute(self, node):
        return self.visit(node.value) if node.attr == "__dict__" else f"{self.visit(node.value)}.{node.attr}"

    def visit_Tuple(self, node):
        return f"[{self.each(node.elts)}]"

    visit_List = visit_Tuple

    def visit_Set(self, node):
        return f"new Set([{self.each(node.elts)}])"

    def visit_Starred(self, node):
        return f"...list({self.visit(node.value)})"

    def visit_Dict(self, node):
        keys = [f"[{self.visit(key)}]: " if key else "..." for key in node.keys]
        return "({" + ", ".join(map(str.__add__, keys, map(self.visit, node.values))) + "})"

    def visit_JoinedStr(self, node):
        empty = [] if isinstance(node.values[0], ast.Constant) else ['""']      # which makes the sum a string
        return "(" + " + ".join([*empty, *map(self.visit, node.values)]) + ")"

    def visit_FormattedValue(self, node):
        if node.format_spec:
            return f"format({self.visit(node.value)}, {self.visit(node.format_spec)})"
        return self.visit(node.value)

    def visit_BinOp(self, node):
        left, right = self.visit(node.left), self.visit(node.right)
        if is_list(node):
            return f"repeat({left}, {right})" if isinstance(node.op, ast.Mult) else f"[...{left}, ...{right}]"
        if isinstance(node.op, ast.FloorDiv):
            return f"Math.floor({left} / {right})"
        return f"({left} {OPERATORS[type(node.op)]} {right})"

    def visit_UnaryOp(self, node):
        if isinstance(node.op, ast.Not):
            return f"(!{self.test(node.operand)})"
        return f"(-{self.visit(node.operand)})"

    def visit_Compare(self, node):
        values = list(map(self.visit, [node.left, *node.comparators]))
        return "(" + " && ".join(map(self.comparison, node.ops, values, values[1:])) + ")"

    def comparison(self, op, a, b):
        special = {ast.In: f"contains({b}, {a})", ast.NotIn: f"!contains({b}, {a})",
                   ast.Is: f"({a} ?? null) === {b}", ast.IsNot: f"({a} ?? null) !== {b}"}
        return special.get(type(op)) or f"{a} {OPERATORS[type(op)]} {b}"

    def visit_BoolOp(self, node):
        word = "both" if isinstance(node.op, ast.And) else "either"
        return f"{word}({', '.join(f'() => {self.visit(value)}' for value in node.values)})"

    def test(self, node):
        if isinstance(node, ast.BoolOp):
            word = " && " if isinstance(node.op, ast.And) else " || "
            return "(" + word.join(map(self.test, node.values)) + ")"
        return self.visit(node) if isinstance(node, ast.Compare) else f"truth({self.visit(node)})"

    def visit_IfExp(self, node):
        return f"({self.test(node.test)} ? {self.visit(node.body)} : {self.visit(node.orelse)})"

    def visit_Subscript(self, node):
        value, index = self.visit(node.value), node.slice
        if isinstance(index, ast.Slice):
            first = self.visit(index.lower) if index.lower else "0"
            end = f", {self.visit(index.upper)}" if index.upper else ""
            return f"{value}.slice({first}{end})"
        if isinstance(index, ast.UnaryOp):                # from the end
            return f"{value}.at({self.visit(index)})"
        return f"{value}[{self.visit(index)}]"

    def visit_Lambda(self, node):
        return f"(({', '.join(arg.arg for arg in node.args.args)}) => {self.visit(node.body)})"

    def loops(self, made, loops):
        target, steps = self.visit(loops[0].target), [f"list({self.visit(loops[0].iter)})"]
        steps += [f"filter(({target}) => {self.test(condition)})" for condition in loops[0].ifs]
        last = f"map(({target}) => {made})"
        if loops[1:]:
            last = f"flatMap(({target}) => {self.loops(made, loops[1:])})"
        return ".".join([*steps, last])

    def visit_ListComp(self, node):
        return self.loops(self.visit(node.elt), node.generators)

    visit_GeneratorExp = visit_ListComp

    def visit_DictComp(self, node):
        pair = f"[{self.visit(node.key)}, {self.visit(node.value)}]"
        return f"Object.fromEntries({self.loops(pair, node.generators)})"

    def visit_Yield(self, node):
        return f"yield {self.visit(node.value)}"

    def visit_YieldFrom(self, node):
        return f"yield* {self.visit(node.value)}"

    def visit_Call(self, node):
        """Each argument in its place, or, of a class, under its name."""
        function, owner, name = node.func, "", getattr(node.func, "id", "")
        if isinstance(function, ast.Attribute):
            owner, name = self.visit(function.value), function.attr
        args = list(map(self.visit, node.args))
        named = {word.arg: self.visit(word.value) for word in node.keywords}
        if special := getattr(self, f"call_{name.strip('_')}", None):
            return special(owner, args, named)
        is_class, names = self.signatures.get(name, (False, PARAMETERS.get(name, ())))
        if is_class:
            return f"new {self.visit(function)}({self.fields(dict(zip(names, args)) | named)})"
        if not named.keys() <= set(names):
            self.generic_visit(node)
        last = max([len(args), *(names.index(word) + 1 for word in named)])
        args += [named.get(word, "undefined") for word in names[len(args):last]]
        return f"{self.visit(function)}({', '.join(args)})"

    def fields(self, named):
        pairs = [f"{name}: {value}" if name else f"...{value}" for name, value in named.items()]
        return "{" + ", ".join(pairs) + "}"

    def call_dict(self, owner, args, named):
        return f"({{{', '.join(f'...{arg}' for arg in args)}{', ' * bool(args)}{self.fields(named)[1:-1]}}})"

    call_SimpleNamespace = call_dict

    def call_replace(self, owner, args, named):
        """dataclasses.replace(x, ...) and x._replace(...)."""
        return f"replace({args[0] if args else owner}, {self.fields(named)})"

    def call_getattr(self, owner, args, named):
        return f"{args[0]}[{args[1]}]" if len(args) == 2 else f"({args[0]}[{args[1]}] ?? {args[2]})"

    def call_get(self, owner, args, named):
        return self.call_getattr(owner, [owner, *args], named)

    def call_max(self, owner, args, named, name="max"):
        values = args[0] if len(args) == 1 else f"[{', '.join(args)}]"
        return f"{name}({values}, {named.get('key', 'undefined')})"

    def call_min(self, owner, args, named):
        return self.call_max(owner, args, named, "min")

    def call_values(self, owner, args, named):
        return f"Object.values({owner})"

    def call_items(self, owner, args, named):
        return f"Object.entries({owner})"

    def call_join(self, owner, args, named):
        return f"list({args[0]}).join({owner})"

    def call_append(self, owner, args, named):
        return f"{owner}.push({args[0]})"

    def call_print(self, owner, args, named):
        return f"console.log({', '.join(args)})"
