// Package archtest has tests of the whole repository. They check
//   - the layers of packages, and that each module has one importer,
//   - that users can use all public names,
//   - that documents name tests and code that exist,
//   - that a reader can follow the guides,
//   - that comments, documents, errors and help are plain English.
package archtest
