package dl

// Machine builds a machine of a test's own for OpenOn.
func Machine(root string, getenv func(string) string, lookPath func(string) (string, error)) *machine {
	return &machine{root: root, getenv: getenv, lookPath: lookPath}
}

var OpenOn = open
