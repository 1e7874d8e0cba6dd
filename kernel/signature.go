package kernel

import (
	"errors"
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A signature is the parsed signature of the last function template of a source.
type signature struct {
	name     string
	params   []parameter
	byReturn bool // the function returns its only output
}

type parameter struct {
	name string
	role role // input, output or scalar
}

var (
	template = regexp.MustCompile(`template\s*<\s*([^>]*)>\s*([\w:\s]+?)\s+(\w+)\s*\(`)
	oneType  = regexp.MustCompile(`^(?:typename|class)\s+\w+\s*$`)
	words    = regexp.MustCompile(`\w+`)
)

// parse parses the source of an element-wise function.
func parse(code string) (*signature, error) {
	code = withoutComments(code)
	all := template.FindAllStringSubmatchIndex(code, -1)
	if len(all) == 0 {
		return nil, fmt.Errorf("there is no function template: want template <typename T> T name(T x, ...) { ... }")
	}
	m := all[len(all)-1]
	sig := &signature{name: code[m[6]:m[7]]}
	if types := code[m[2]:m[3]]; !oneType.MatchString(types) {
		return nil, fmt.Errorf("%s is a template of <%s>: want one type, <typename T>", sig.name, types)
	}
	before := words.FindAllString(code[m[4]:m[5]], -1)
	sig.byReturn = before[len(before)-1] != "void"
	list, rest, ok := strings.Cut(code[m[1]:], ")")
	if !ok || !strings.HasPrefix(strings.TrimSpace(rest), "{") {
		return nil, fmt.Errorf("%s has no body behind its parameters: want name(T x, ...) { ... }", sig.name)
	}
	for i, text := range strings.Split(list, ",") {
		p, err := parseParameter(text)
		if err != nil {
			return nil, fmt.Errorf("parameter %d of %s, %q: %w", i, sig.name, strings.TrimSpace(text), err)
		}
		sig.params = append(sig.params, p)
	}
	outputs := len(sig.named(output))
	switch {
	case sig.byReturn && outputs > 0:
		return nil, fmt.Errorf("%s returns a result and has outputs, T&: want one or the other", sig.name)
	case !sig.byReturn && outputs == 0:
		return nil, fmt.Errorf("%s returns nothing and has no output, T&", sig.name)
	}
	return sig, nil
}

// parseParameter parses a parameter: T x, const T& x, or T& x for an output.
func parseParameter(text string) (p parameter, err error) {
	names := words.FindAllString(text, -1)
	switch {
	case len(names) < 2:
		return p, errors.New("it has no type or no name")
	case strings.ContainsAny(text, "*[<="):
		return p, errors.New("want T x, or T& x for an output")
	}
	p.name = names[len(names)-1]
	if strings.Contains(text, "&") && !slices.Contains(names, "const") {
		p.role = output
	}
	return p, nil
}

// named returns the names of the parameters with a role.
func (s *signature) named(r role) (names []string) {
	for _, p := range s.params {
		if p.role == r {
			names = append(names, p.name)
		}
	}
	return names
}

func (s *signature) outputs() int {
	if s.byReturn {
		return 1
	}
	return len(s.named(output))
}
