package kernel

import (
	"fmt"
	"regexp"
	"slices"
	"strings"
)

// A signature is what the last function template of a source says.
type signature struct {
	name     string
	params   []parameter
	byReturn bool // the one output is the result
}

type parameter struct {
	name string
	role role // input, output or scalar
}

var (
	comments = regexp.MustCompile(`(?s)//[^\n]*|/\*.*?\*/`)
	template = regexp.MustCompile(`template\s*<\s*([^>]*)>\s*([\w:\s]+?)\s+(\w+)\s*\(`)
	oneType  = regexp.MustCompile(`^(?:typename|class)\s+\w+\s*$`)
	words    = regexp.MustCompile(`\w+`)
)

// parse reads the source of an element-wise function.
func parse(code string) (*signature, error) {
	code = comments.ReplaceAllString(code, " ")
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
	outputs := 0
	for i, p := range strings.Split(list, ",") {
		names := words.FindAllString(p, -1)
		if len(names) < 2 {
			return nil, fmt.Errorf("parameter %d of %s, %q, has no type or no name", i, sig.name, strings.TrimSpace(p))
		}
		if strings.ContainsAny(p, "*[<=") {
			return nil, fmt.Errorf("parameter %d of %s, %q: want T x, or T& x for an output", i, sig.name, strings.TrimSpace(p))
		}
		q := parameter{name: names[len(names)-1]}
		if strings.Contains(p, "&") && !slices.Contains(names, "const") {
			q.role = output
			outputs++
		}
		sig.params = append(sig.params, q)
	}
	switch {
	case sig.byReturn && outputs > 0:
		return nil, fmt.Errorf("%s returns a result and has outputs, T&: want one or the other", sig.name)
	case !sig.byReturn && outputs == 0:
		return nil, fmt.Errorf("%s returns nothing and has no output, T&", sig.name)
	}
	return sig, nil
}

// named lists the names of the parameters of a role.
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
