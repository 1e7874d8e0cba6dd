package cluster

import (
	"reflect"
	"strings"

	"github.com/gochorus/chorus/internal/plain"
)

// maxNameBytes limits the names of jobs, hosts and processes.
const maxNameBytes = 255

// checkName returns an error if a name cannot be printed unchanged.
func checkName(of, name string) error {
	switch {
	case len(name) > maxNameBytes:
		return badConfig("the name of the %s has %d bytes: want at most %d", of, len(name), maxNameBytes)
	case strings.ContainsRune(name, '\\') || plain.Text(name) != name:
		return badConfig("the name of the %s is %s: want graphic characters, and no backslash", of, plain.Text(name))
	}
	return nil
}

// checkNames validates the names in a registration. Control characters were
// already replaced by escapes with backslashes.
func checkNames(names ...string) *refusal {
	for _, n := range names {
		if err := checkName("host or process", n); err != nil {
			return &refusal{Reason: strings.TrimPrefix(err.Error(), "cluster: ")}
		}
	}
	return nil
}

// quoteTexts escapes control characters in all texts of a record, because the
// texts come from another process and appear in messages.
func quoteTexts(v reflect.Value) {
	switch v.Kind() {
	case reflect.Pointer:
		if !v.IsNil() {
			quoteTexts(v.Elem())
		}
	case reflect.Struct:
		for i := range v.NumField() {
			quoteTexts(v.Field(i))
		}
	case reflect.Slice:
		for i := range v.Len() {
			quoteTexts(v.Index(i))
		}
	case reflect.String:
		if v.CanSet() {
			v.SetString(plain.Text(v.String()))
		}
	}
}
