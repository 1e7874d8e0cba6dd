// Package env is the registry of the environment variables that Chorus reads. Each
// variable is declared once, with its default and its meaning. docs/ENVIRONMENT.md is
// generated from the declarations.
package env

import (
	"errors"
	"fmt"
	"os"
	"slices"
	"strconv"
	"strings"
	"sync"
	"time"

	"golang.org/x/sys/unix"
)

// A Var is a declared environment variable. All are package variables of this package.
type Var struct {
	Name    string
	Type    string // "text", "number", "duration", "yes/no"
	Default string // in the format of the variable; "" means unset
	Meaning string // for docs/ENVIRONMENT.md
}

// Value returns the value from the environment, or the default.
func (v *Var) Value() string {
	if s, ok := Lookup(v.Name); ok {
		return s
	}
	return v.Default
}

// IsSet reports whether the variable is set in the environment.
func (v *Var) IsSet() bool { _, ok := Lookup(v.Name); return ok }

// Lookup is os.LookupEnv, except that nothing is set in a process that must not trust its environment.
func Lookup(name string) (string, bool) {
	if IsUntrusted() {
		return "", false
	}
	return os.LookupEnv(name)
}

// IsUntrusted reports whether this process has more rights than its starter, as a set-uid program. As in the system's
// loader, the starter's environment then chooses no library, folder or file.
var IsUntrusted = sync.OnceValue(func() bool {
	vector, err := unix.Auxv()
	return err != nil || isSecure(vector)
})

// UserCacheDir is os.UserCacheDir, which the environment chooses.
func UserCacheDir() (string, error) {
	if IsUntrusted() {
		return "", errors.New("a program with more rights than its starter has no cache directory")
	}
	return os.UserCacheDir()
}

// atSecure is the key of AT_SECURE in the auxiliary vector of a process.
const atSecure = 23

func isSecure(vector [][2]uintptr) bool {
	return slices.ContainsFunc(vector, func(pair [2]uintptr) bool { return pair[0] == atSecure && pair[1] != 0 })
}

// Int returns the value as a number.
func (v *Var) Int() (int, error) {
	n, err := strconv.Atoi(strings.TrimSpace(v.Value()))
	if err != nil {
		return 0, &ValueError{Name: v.Name, Value: v.Value(), Want: "a whole number"}
	}
	return n, nil
}

// Uint64 returns the value as an unsigned number.
func (v *Var) Uint64() (uint64, error) {
	n, err := strconv.ParseUint(strings.TrimSpace(v.Value()), 0, 64)
	if err != nil {
		return 0, &ValueError{Name: v.Name, Value: v.Value(), Want: "a number of at most 64 bits"}
	}
	return n, nil
}

// Duration returns the value as a duration such as 30s.
func (v *Var) Duration() (time.Duration, error) {
	d, err := time.ParseDuration(strings.TrimSpace(v.Value()))
	if err != nil {
		return 0, &ValueError{Name: v.Name, Value: v.Value(), Want: "a duration such as 30s"}
	}
	return d, nil
}

// OneOf returns the value if it is one of words, and otherwise an error that
// lists them.
func (v *Var) OneOf(words ...string) (string, error) {
	s := v.Value()
	if !slices.Contains(words, s) {
		return "", &ValueError{Name: v.Name, Value: s, Want: "one of " + strings.Join(words, ", ")}
	}
	return s, nil
}

// A ValueError reports a variable with an invalid value.
type ValueError struct{ Name, Value, Want string }

func (e *ValueError) Error() string {
	return fmt.Sprintf("env: %s=%q: want %s", e.Name, e.Value, e.Want)
}
