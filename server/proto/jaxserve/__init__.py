"""Generated code lives below; its folders follow the package of the protocol, jaxserve.v1."""
